"""The cause of the largest gap, end to end: a pause that a test makes is found where it was made."""

from __future__ import annotations

import asyncio
import time
from array import array

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Terms
from tests.support.stub_llm import PROMPT, read, says

PAUSE_S = 0.25
LONG = SamplingParams(max_tokens=60)
SLOW = array("I", [66])


def script(request):
    if list(memoryview(request.prompt).cast("I")) == list(SLOW):
        time.sleep(PAUSE_S)  # on the engine's thread: its loop stands still
    return [97] * request.max_tokens


async def paused(llm, pause, *, at: int = 20):
    generation = llm.open(PROMPT, LONG)
    async for _ in generation:
        if generation.completion_tokens == at:
            await pause()
    return generation.timings()["worst_gap"]


async def test_a_pause_of_the_engines_loop(serve):
    llm = await serve(script, step_s=0.002)
    others = []

    async def pause():
        others.append(llm.open(SLOW, SamplingParams(max_tokens=1)))

    worst = await paused(llm, pause)
    assert worst["cause"] == "host"
    assert worst["ms"] > 900 * PAUSE_S
    assert worst["parts_ms"]["host"] > 900 * PAUSE_S
    assert 20 <= worst["token"] <= 24
    # The record of that step tells the same.
    found = next(step for step in llm.steps.last(100) if step.step_id == worst["step"])
    assert found.decode_rows
    await read(others[0])


async def test_an_event_loop_that_had_other_work(serve):
    llm = await serve(script, step_s=0.002)

    async def pause():
        asyncio.get_running_loop().call_later(0.01, time.sleep, PAUSE_S)

    worst = await paused(llm, pause)
    assert worst["cause"] == "api"
    assert worst["parts_ms"]["api"] > 800 * PAUSE_S


async def test_a_consumer_who_took_his_time(serve):
    llm = await serve(script, step_s=0.002)

    async def pause():
        await asyncio.sleep(PAUSE_S)

    worst = await paused(llm, pause)
    assert worst["cause"] == "write"
    assert worst["parts_ms"]["write"] > 800 * PAUSE_S


async def test_one_token_has_no_gap(serve):
    llm = await serve(says("a"), step_s=0.001)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=1))
    await read(generation)
    assert generation.timings()["worst_gap"] is None


async def test_whose_prompt_it_was_is_told_to_its_own_tenant_only(serve):
    llm = await serve(script, step_s=0.002)
    first = llm.open(PROMPT, LONG, request_id="first", terms=Terms(tenant="a"))
    other = llm.open(PROMPT, SamplingParams(max_tokens=1), request_id="other", terms=Terms(tenant="b"))
    sources = first.account().sources
    assert sources.whose(other.engine_ids[0], "b") == "request other"
    assert sources.whose(other.engine_ids[0], "a") == "another caller's"
    assert sources.whose(1 << 40, "a") == "another caller's"
    await read(first)
    await read(other)


async def test_it_is_told_after_the_request_has_ended_too(serve):
    llm = await serve(script, step_s=0.002)
    async for _ in llm.generate({"prompt_token_ids": [1, 2]}, LONG, "mine"):
        pass
    (ended,) = llm.recent.latest(1)
    assert llm.recent.of_engine(ended.engine_ids[0]) is ended
    assert ended.account["worst_gap"]["ms"] > 1
