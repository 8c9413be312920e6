"""However a call ends: the log, the records and ``/metrics`` say the same of it, each once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.core.service import KeyRule, ServiceClass, Targets
from firsttoken.engine.stub import Fault
from firsttoken.observability.logging import JSONFormatter
from firsttoken.server.config import ServerConfig
from tests.server.conftest import forever

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RULE = KeyRule(max_class=ServiceClass.P1)
CONFIG = ServerConfig(api_keys=("shop=right",), targets=Targets(keys={"shop": RULE}), max_body_bytes=2000)
KEY = {"authorization": "Bearer right"}
HI = {"prompt": "hi", "max_tokens": 3}
# What is asked, and the outcome and code of it.
CASES = [
    (COMPLETIONS, HI, "finished", ""),
    (COMPLETIONS, {**HI, "n": 3}, "finished", ""),
    (COMPLETIONS, {**HI, "stream": True}, "finished", ""),
    (COMPLETIONS, {**HI, "nonsense": 1}, "refused", "unknown_parameter"),
    (COMPLETIONS, {**HI, "model": "other"}, "refused", "model_not_found"),
    (COMPLETIONS, {**HI, "service_tier": "p0"}, "refused", "service_tier_not_allowed"),
    (COMPLETIONS, b"{", "refused", "invalid_json"),
    (COMPLETIONS, b" " * 3000, "refused", "body_too_large"),
    (COMPLETIONS, {**HI, "prompt": ["ok", "x" * 600]}, "refused", "context_length_exceeded"),
    (COMPLETIONS, {**HI, "prompt": "x" * 300}, "refused", "context_length_exceeded"),
    (COMPLETIONS, {**HI, "deadline_ms": 0.0001}, "expired", "deadline_exceeded"),
    (COMPLETIONS, {**HI, "prompt": "fault"}, "failed", "generation_failed"),
    (COMPLETIONS, {**HI, "prompt": "fault", "stream": True}, "failed", "generation_failed"),
    (CHAT, {"messages": []}, "refused", "empty_messages"),
    ("/tokenize", {"prompt": "hi"}, "finished", ""),
    ("/tokenize", {"prompt": 3}, "refused", "invalid_type"),
]


def script(request):
    return [97, Fault("boom")] if request.prompt[0] == ord("f") else forever(request)


class Books:
    """What the log, the records and the metrics say, as counts of ``(outcome, code)``."""

    def __init__(self, client, caplog) -> None:
        self._client, self._caplog = client, caplog

    def lines(self) -> list[dict]:
        records = [one for one in self._caplog.records if one.name == "firsttoken.server.access"]
        return [line for line in (json.loads(JSONFormatter().format(one)) for one in records) if "outcome" in line]

    def log(self) -> Counter:
        return Counter((line["outcome"], line.get("code", "")) for line in self.lines())

    def kept(self) -> Counter:
        return Counter((one.outcome, one.error) for one in self._client.llm.recent.latest(1000))

    async def metrics(self) -> Counter:
        text = (await self._client.get("/metrics", headers=KEY)).body.decode()
        found: Counter = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "firsttoken_requests_served_total":
                    found["finished", ""] += int(sample.value)
                elif sample.name == "firsttoken_requests_refused_total" and sample.value:
                    found[sample.labels["outcome"], sample.labels["code"]] += int(sample.value)
        return found


@pytest.fixture
def books(caplog):
    caplog.set_level(logging.DEBUG, "firsttoken.server.access")
    return lambda client: Books(client, caplog)


async def leave(client) -> None:
    call = client.start(COMPLETIONS, {"prompt": "hi", "max_tokens": 200, "stream": True}, headers=KEY)
    await call.first_byte.wait()
    call.leave()
    await asyncio.wait_for(call.task, 2)
    await client.quiet()


async def test_the_books_agree_over_all_kinds_of_ends(make_client, books):
    async with make_client(script, CONFIG, max_model_len=256, step_s=0.001) as client:
        told = books(client)
        expected: Counter = Counter()
        for path, body, outcome, code in CASES:
            reply = await client.post(path, body, headers=KEY)
            expected[outcome, code] += 1
            (line,) = told.lines()[-1:]
            assert (line["outcome"], line.get("code", "")) == (outcome, code), (path, body, reply.body)
            assert (line["key"], line["status"]) == ("shop", reply.status)
            assert "right" not in str(line)
        await leave(client)
        expected["aborted", ""] += 1
        kept = told.kept()
        for body, outcome, code in (
            ({}, "refused", "invalid_api_key"),
            ("GET", "refused", "method_not_allowed"),
        ):
            if body == "GET":
                await client.get(COMPLETIONS, headers=KEY)
            else:
                await client.post(COMPLETIONS, body)
            expected[outcome, code] += 1
        assert await told.metrics() == told.log() == expected
        # Of what was not read nothing is kept, nor of routes that run no request.
        unkept = Counter({("refused", "invalid_type"): 1, ("finished", ""): 1})
        unkept += Counter({("refused", "invalid_api_key"): 1, ("refused", "method_not_allowed"): 1})
        assert told.kept() == kept == expected - unkept
        # A frame tells the last minute.
        outcomes = client.llm.metrics.live.outcomes()
        assert outcomes == {name: sum(n for (end, _), n in expected.items() if end == name) for name in outcomes}


@pytest.mark.parametrize("why", ["dead", "draining"])
async def test_a_server_that_serves_nobody_says_so_in_all_books(make_client, books, why):
    async with make_client(forever, step_s=0.001) as client:
        told = books(client)
        call = client.start(COMPLETIONS, {"prompt": "hi", "max_tokens": 4000, "stream": True})
        await call.first_byte.wait()
        if why == "dead":
            client.engine.kill()
            await asyncio.wait_for(call.task, 2)
            assert client.llm.recent.latest(1)[0].status == call.reply.status == 200
            expected = Counter({("failed", "engine_dead"): 11})
        else:
            await client.llm.drain(0.01)
            expected = Counter({("refused", "server_draining"): 10})
        for number in range(10):
            body = {"prompt": "hi"} if number % 2 else {"messages": [{"role": "user", "content": "hi"}]}
            reply = await client.post(COMPLETIONS if number % 2 else CHAT, body)
            assert reply.status == 503
        assert await told.metrics() == told.log() == told.kept() == expected
        if why == "draining":
            call.leave()
            await asyncio.wait_for(call.task, 2)
            await client.quiet()
            assert await told.metrics() == told.log() == told.kept() == expected + Counter({("aborted", ""): 1})
        value = client.llm.metrics.registry.get_sample_value
        assert value("firsttoken_request_duration_seconds_count", {"service_class": "p2"}) == 0
