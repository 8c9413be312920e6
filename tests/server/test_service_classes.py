"""``service_tier``, ``deadline_ms`` and the rules of keys, through the HTTP door."""

from __future__ import annotations

import asyncio

import openai
import pytest

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import KeyRule, ServiceClass, Targets
from firsttoken.server.config import ServerConfig
from tests.server.conftest import forever
from tests.support.byte_tokenizer import EOS as END

MESSAGES = [{"role": "user", "content": "hi"}]
P0, P1, P2 = ServiceClass
TARGETS = Targets(
    keys={
        "gold": KeyRule(service_class=P1, share=3.0),
        "silver": KeyRule(max_class=P1),
        "batch": KeyRule(max_class=P2, share=0.5),
    }
)
KEYS = ServerConfig(
    api_keys=("gold=g=1", "gold=g2", "silver=s", "batch=b", "plain", "other=odd"),
    targets=TARGETS,
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def keyed(make_client):
    """A client of a server with keys; ``seen`` are the requests that its engine got."""
    seen = []

    def script(request):
        seen.append(request)
        return [*b"ok", END]

    async with make_client(script, config=KEYS) as client:
        client.seen = seen
        yield client


async def ask(client, key: str, path: str = "/v1/chat/completions", **fields):
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    return await client.post(path, {**prompt, **fields}, headers=bearer(key))


# --------------------------------------------------------------------------- tiers


@pytest.mark.parametrize(
    ("tier", "service", "answered"),
    [
        (None, P2, "default"),
        ("auto", P2, "default"),
        ("default", P2, "default"),
        ("flex", P2, "flex"),
        ("priority", P1, "priority"),
        ("fast", P1, "priority"),
        ("p0", P0, "p0"),
        ("p1", P1, "p1"),
        ("p2", P2, "p2"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_without_keys_everything_may_be_asked(make_client, path, tier, service, answered):
    seen = []

    def script(request):
        seen.append(request)
        return [*b"ok", END]

    async with make_client(script) as client:
        body = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
        whole = await client.post(path, {**body, "service_tier": tier, "priority": -3})
        stream = await client.post(path, {**body, "service_tier": tier, "stream": True})
    assert whole.json["service_tier"] == answered
    assert {event["service_tier"] for event in stream.events[:-1]} == {answered}
    assert [(one.service, one.tenant, one.share, one.deadline_ns) for one in seen] == [(service, "", 1.0, 0)] * 2
    assert [one.priority for one in seen] == [-3, 0]


async def test_every_chunk_has_the_tier_with_usage_too(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await client.chat(stream=True, stream_options=options, service_tier="p1", n=2)
    assert {event["service_tier"] for event in reply.events[:-1]} == {"p1"}
    assert reply.events[-2]["usage"]["completion_tokens"] == 28


@pytest.mark.parametrize(
    ("key", "tier", "service", "answered"),
    [
        ("g=1", None, P1, "priority"),
        ("g2", "auto", P1, "priority"),
        ("g=1", "p0", P0, "p0"),
        ("g=1", "flex", P2, "flex"),
        ("s", None, P2, "default"),
        ("s", "priority", P1, "priority"),
        ("b", "default", P2, "default"),
        ("plain", "p0", P0, "p0"),
        ("plain", None, P2, "default"),
        ("other=odd", "p0", P0, "p0"),
    ],
)
async def test_a_key_has_its_class_up_to_its_best(keyed, key, tier, service, answered):
    reply = await ask(keyed, key, service_tier=tier)
    assert (reply.status, reply.json["service_tier"]) == (200, answered)
    assert keyed.seen[0].service == service


@pytest.mark.parametrize(("key", "tier"), [("s", "p0"), ("b", "p1"), ("b", "p0"), ("b", "priority"), ("b", "fast")])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_better_class_than_the_keys_is_refused_not_lowered(keyed, key, tier, path):
    for stream in (False, True):
        reply = await ask(keyed, key, path, service_tier=tier, stream=stream)
        assert (reply.status, reply.error["code"]) == (403, "service_tier_not_allowed")
        assert reply.error["param"] == "service_tier"
        assert f"may have {'p1' if key == 's' else 'p2'} at best" in reply.error["message"]
    assert not keyed.seen


@pytest.mark.parametrize("key", ["gold=g=1", "gold", "odd", "g", "1", ""])
async def test_a_name_is_no_part_of_a_key_and_opens_nothing(keyed, key):
    assert (await ask(keyed, key)).status == 401


async def test_tenants_and_shares_come_from_the_key(keyed):
    for key in ("g=1", "g2", "s", "b", "plain"):
        assert (await ask(keyed, key, cache_salt="x")).status == 200
    gold, again, silver, batch, plain = keyed.seen
    assert (gold.share, silver.share, batch.share, plain.share) == (3.0, 1.0, 0.5, 1.0)
    assert gold.tenant == again.tenant, "a second key of one name is the same caller"
    assert len({one.tenant for one in keyed.seen}) == 4
    assert all(one.salt.endswith("/x") for one in keyed.seen)
    assert gold.salt == again.salt
    assert len({one.salt for one in keyed.seen}) == 4


# ----------------------------------------------------------------------- deadlines


async def busy(client):
    """A stream that holds the only row of the engine."""
    stream = client.start("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 4000})
    await asyncio.wait_for(stream.first_byte.wait(), 2)
    return stream


@pytest.mark.clock
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_cannot_start_in_time_ends_with_504(make_client, path, stream):
    async with make_client(forever, step_s=0.002, max_num_seqs=1) as client:
        running = await busy(client)
        body = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
        began = now_ns()
        reply = await client.post(path, {**body, "stream": stream, "deadline_ms": 30})
        waited_ms = (now_ns() - began) / 1e6
        assert (reply.status, reply.error["code"], reply.error["param"]) == (504, "deadline_exceeded", "deadline_ms")
        assert "deadline" in reply.error["message"]
        assert 29 < waited_ms < 1000
        running.leave()
        await client.quiet()
        assert (await client.post(path, {**body, "max_tokens": 3, "deadline_ms": 10_000})).status == 200


async def test_one_answer_that_came_too_late_ends_a_stream_with_an_error(make_client):
    async with make_client(forever, step_s=0.002, max_num_seqs=1) as client:
        reply = await client.complete(n=2, stream=True, max_tokens=1000, deadline_ms=40)
        assert reply.status == 200
        assert set(reply.events[0]["choices"][0]["text"]) == {"x"}  # a slow reader gets several at once
        assert reply.events[-1]["error"]["code"] == "deadline_exceeded"
        await client.quiet()


async def test_a_started_request_may_run_past_its_deadline(make_client):
    async with make_client(forever, step_s=0.002) as client:
        reply = await client.complete(max_tokens=50, deadline_ms=30)
        assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 50)


async def test_the_time_counts_from_arrival(make_client):
    seen = []

    def script(request):
        seen.append(request)
        return [END]

    async with make_client(script) as client:
        before = now_ns()
        await client.chat(deadline_ms=5000.5)
        after = now_ns()
    assert before <= seen[0].deadline_ns - 5_000_500_000 <= after
    assert seen[0].deadline_ns - 5_000_500_000 <= seen[0].stamps[0][1]


# ------------------------------------------------------------------------- metrics


async def test_metrics_are_told_apart_by_class(client):
    await client.chat(service_tier="p0")
    await client.complete(service_tier="priority", n=3)
    await client.chat()
    text = (await client.get("/metrics")).body.decode()
    for name, count in (("p0", 1), ("p1", 3), ("p2", 1)):
        assert f'firsttoken_requests_ended_total{{outcome="finished",service_class="{name}"}} {count}.0' in text
        assert f'firsttoken_time_to_first_token_seconds_count{{service_class="{name}"}} 1.0' in text
        gaps = 13.0 * count
        assert f'firsttoken_inter_token_latency_seconds_count{{service_class="{name}"}} {gaps}' in text


# ------------------------------------------------------------------ the official client


async def test_the_official_client(keyed, serve_http):
    async with serve_http(keyed.app) as url:

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=10)

        def talk() -> None:
            with client("g2") as ai:
                answer = ai.chat.completions.create(model="stub", messages=MESSAGES, service_tier="priority")
                assert answer.service_tier == "priority"
                chunks = list(
                    ai.chat.completions.create(
                        model="stub", messages=MESSAGES, stream=True, extra_body={"service_tier": "p0"}
                    )
                )
                assert [chunk.service_tier for chunk in chunks] == ["p0"] * len(chunks)
                with ai.chat.completions.stream(model="stub", messages=MESSAGES, service_tier="flex") as stream:
                    stream.until_done()
                assert stream.get_final_completion().service_tier == "flex"
            with client("b") as ai, pytest.raises(openai.PermissionDeniedError) as refused:
                ai.chat.completions.create(model="stub", messages=MESSAGES, service_tier="priority")
            assert (refused.value.code, refused.value.param) == ("service_tier_not_allowed", "service_tier")

        await asyncio.to_thread(talk)


async def test_the_official_client_hears_of_a_deadline(make_client, serve_http):
    async with make_client(forever, step_s=0.002, max_num_seqs=1) as client, serve_http(client.app) as url:
        running = await busy(client)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as ai:
            with pytest.raises(openai.InternalServerError) as late:
                await ai.completions.create(model="stub", prompt="a", extra_body={"deadline_ms": 20})
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        running.leave()
        await client.quiet()


# ------------------------------------------------------------------------- the start

ONE_RULE = Targets(keys={"gold": KeyRule()})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((), "rule for a key called 'gold'.*--api-key gold=KEY"),
        (("plain",), "rule for a key called 'gold'"),
        (("gold",), "rule for a key called 'gold'"),
        (("Gold=x",), "rule for a key called 'gold'"),
        (("gold=",), "printable ASCII, not empty"),
        (("gold= x",), "without blanks"),
        (("gold=secret", "secret"), "under two names"),
    ],
)
def test_rules_and_keys_must_fit(keys, says):
    with pytest.raises(ConfigError, match=says) as caught:
        ServerConfig(api_keys=keys, targets=ONE_RULE)
    assert "secret" not in str(caught.value), "keys stay out of logs"
