"""Under a mixed load on a real engine that has too little of everything, each request's account is whole: every instant
has an owner, and what callers saw end is what the metrics count."""

from __future__ import annotations

import asyncio

import pytest

from firsttoken import AsyncEngineArgs, AsyncLLM
from firsttoken.observability.account import STAGES
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client

pytestmark = pytest.mark.clock

REQUESTS = 64
ARGS = AsyncEngineArgs(
    model="random:tiny-llama",
    max_model_len=512,
    max_num_seqs=6,
    kv_memory=1 << 20,
    threads=1,
    quantization="none",
    dtype="float32",
)


@pytest.fixture
async def real(tokenizer):
    async with await AsyncLLM.launch(ARGS, in_process=True, tokenizer=tokenizer) as llm:
        yield Client(build_app(llm, ServerConfig()), llm, None)


def body(number: int) -> dict:
    """Long and short prompts, streams and not, several answers, stop strings, all classes, and some that end badly."""
    asked = {
        "prompt": [3 + number % 60, *[7] * (250 if number % 7 == 0 else 20)],
        "max_tokens": 5 + 3 * (number % 30),
        "stream": number % 2 == 0,
        "n": 3 if number % 5 == 0 else 1,
        "service_tier": f"p{number % 3}",
        "ignore_eos": True,
        "seed": number,
    }
    if number % 8 == 3:
        asked |= {"stop": ["a", "e", "zz"], "ignore_eos": False}
    if number % 16 == 5:
        asked["deadline_ms"] = 1
    if number % 16 == 9:
        asked["temperature"] = -1
    return asked


async def ask(client: Client, number: int) -> None:
    if number % 3 == 0:  # the best class comes when worse ones hold all places
        while client.llm.stats.running < ARGS.max_num_seqs:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    call = client.start("/v1/completions", body(number), headers={"x-request-id": f"r{number}"})
    if number % 6 == 1:  # leaves, some while they queue
        await asyncio.sleep(0.002 * number)
        call.leave()
    await asyncio.wait_for(call.task, 60)


async def records(client: Client) -> list[dict]:
    """All of them, once the engine's last word of those that left is there too."""
    async with asyncio.timeout(10):
        while len(client.llm.recent) < REQUESTS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return [(await client.get(f"/v1/requests/r{number}")).json for number in range(REQUESTS)]


@pytest.mark.timeout(120)
async def test_every_instant_of_every_request_has_an_owner(real):
    await asyncio.gather(*(ask(real, number) for number in range(REQUESTS)))
    found = await records(real)
    for one in found:
        timings = one["timings"]
        assert sum(timings[stage] for stage in STAGES) == pytest.approx(timings["total_ms"], abs=1e-6), one
        assert all(timings[stage] >= 0 for stage in STAGES), one
        assert timings["unaccounted_ms"] < max(0.02 * timings["total_ms"], 1), one
        assert sum(timings["queue_reasons"].values()) == pytest.approx(timings["queue_ms"], abs=1e-6), one
        assert one["timeline"][-1][0] == "written"
        if timings["worst_gap"]:
            assert sum(timings["worst_gap"]["parts_ms"].values()) == pytest.approx(timings["worst_gap"]["ms"], abs=1e-6)
    # The load was what it was meant to be.
    assert {one["outcome"] for one in found} == {"finished", "aborted", "refused", "expired"}
    assert any(one["timings"]["preemptions"] for one in found)
    assert any(one["timings"]["queue_reasons"].get("slot") for one in found)
    assert any(one["timings"]["prefill_steps"] > 1 for one in found)
    assert {one["finish_reason"] for one in found} >= {"stop", "length"}
    check_counts(real, found)


def check_counts(client: Client, found: list[dict]) -> None:
    value = client.llm.metrics.registry.get_sample_value

    def total(name: str, **labels: str) -> float:
        return sum(value(name, {**labels, "service_class": each}) for each in ("p0", "p1", "p2"))

    ended = {
        name: total("firsttoken_requests_ended_total", outcome=name)
        for name in ("finished", "aborted", "refused", "expired", "failed")
    }
    asked = [one for one in found if one["outcome"] != "refused"]
    answers = {f"r{number}": body(number)["n"] for number in range(REQUESTS)}
    assert total("firsttoken_requests_started_total") == sum(ended.values())
    assert client.llm.stats.running == client.llm.stats.waiting == 0
    for outcome in ("finished", "expired"):
        assert ended[outcome] == sum(answers[one["id"]] for one in asked if one["outcome"] == outcome)
    assert ended["failed"] == ended["refused"] == 0
    got = sum(one["output_tokens"] for one in found)
    assert got <= client.llm.stats.output_tokens, "callers cannot have more than the engine made"
    whole = [one for one in asked if one["outcome"] == "finished" and one["finish_reason"] == "length"]
    assert all(
        one["output_tokens"] == answers[one["id"]] * body(int(one["id"][1:]))["max_tokens"]
        for one in whole
        if "stop" not in body(int(one["id"][1:]))
    )
