"""What callers and probes see of an engine that dies and is started again, and of one that is not."""

from __future__ import annotations

import asyncio
import json
import math
import random

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.frontend.restarts import RestartPolicy
from firsttoken.server.config import ServerConfig
from tests.server.conftest import forever

ONCE = RestartPolicy(limit=1)
PROBES = ("/health", "/ping", "/health/live", "/health/ready", "/health/progress")


async def statuses(client) -> list[int]:
    return [(await client.get(path)).status for path in PROBES]


async def test_a_death_is_told_to_its_callers_and_outlived(make_client):
    async with make_client(forever, step_s=0.002, restarts=ONCE) as client:
        stream = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "stream": True})
        whole = client.start("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        await stream.first_byte.wait()
        assert await statuses(client) == [200] * 5
        client.engine.kill("the device is on fire")
        await asyncio.wait_for(asyncio.gather(stream.task, whole.task), 2)
        told = stream.reply.events[-1]["error"]
        assert told["code"] == "engine_dead"
        assert stream.reply.complete
        again = "It is being started again, without this request: send the request again in 1 s."
        assert told["message"] == f"The engine stopped: the device is on fire. {again}"
        assert (whole.reply.status, whole.reply.error["code"]) == (503, "engine_dead")
        assert whole.reply.headers["retry-after"] == "1"

        assert await statuses(client) == [200, 200, 200, 503, 503], "it lives, and takes nothing"
        ready = await client.get("/health/ready")
        assert ready.json == {
            "status": "restarting",
            "reason": "the engine stopped: the device is on fire",
            "retry_after_s": 1,
        }
        assert ready.headers["retry-after"] == "1"
        for reply in (await client.complete(), await client.chat(), await client.get("/v1/models")):
            assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
            assert reply.headers["retry-after"] == "1"
        metrics = (await client.get("/metrics")).body.decode()
        assert "\nfirsttoken_engine_up 0.0\n" in metrics
        assert "\nfirsttoken_engine_deaths_total 1.0\n" in metrics

        async with asyncio.timeout(5):
            while (await client.get("/health/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await client.complete(max_tokens=3)).json["choices"][0]["text"] == "xxx"
        assert (await client.get("/health/progress")).json["restarts"] == 1
        assert "\nfirsttoken_engine_restarts_total 1.0\n" in (await client.get("/metrics")).body.decode()
        old = await client.get(f"/v1/requests/{stream.reply.headers['x-request-id']}")
        assert (old.status, old.json["outcome"]) == (200, "failed"), "what has ended is remembered"


async def test_nothing_is_counted_backwards(make_client):
    rng = random.Random(1)
    async with make_client(forever, step_s=0.001, restarts=RestartPolicy(limit=9, pause_s=0.001)) as client:
        before: dict[str, float] = {}
        for _ in range(3):
            await asyncio.gather(*(client.complete(max_tokens=rng.randint(1, 9)) for _ in range(5)))
            client.llm._engine.link.handle.kill()
            for moment in ("dead", "alive"):
                async with asyncio.timeout(5):
                    while client.llm.is_running is (moment == "dead"):  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                now = dict(counters((await client.get("/metrics")).body.decode()))
                assert not {name: (value, now.get(name)) for name, value in before.items() if now.get(name, -1) < value}
                before = now
        assert before["firsttoken_engine_restarts_total"] == 3
        assert before["firsttoken_output_tokens_total"] == before["vllm:generation_tokens_total"] >= 15


def counters(text: str):
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if (
            not line.startswith("#")
            and name.partition("{")[0].endswith(("_total", "_bucket", "_count"))
            and "process" not in name
        ):
            yield name.replace('{engine="0",model_name="stub"}', ""), float(value)


def test_a_server_that_has_lost_its_engine_ends(start):
    server = start(engine_restarts=1)
    for code in ("engine_dead", "engine_dead"):
        reply = server.ask("POST", "/v1/completions", {"prompt": "!", "max_tokens": 9})
        assert (reply.status, json.load(reply)["error"]["code"]) == (503, code)
        if server.process.poll() is None and reply.headers["Retry-After"] == "1":
            while server.ask("GET", "/health/ready").status != 200:
                pass
    assert server.wait(5) == 1
    said = server.said()
    assert "the engine is ready again" in said
    assert "the server ends" in said


@pytest.mark.parametrize(
    "wrong", [{"engine_restarts": -1}, {"engine_hung_s": 1}, {"engine_hung_s": math.nan}, {"engine_hung_s": math.inf}]
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} must be .*, got"):
        ServerConfig(**wrong)
