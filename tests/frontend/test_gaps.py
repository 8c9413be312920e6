"""The cause of the largest gap, end to end: a pause that a test makes is found where it was made."""

from __future__ import annotations

import asyncio
import time
from array import array

import pytest

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Terms
from firsttoken.core.step_record import StepRecord
from firsttoken.core.timeline import Mark
from firsttoken.frontend.gaps import steps_of
from firsttoken.observability.step_history import StepHistory
from firsttoken.observability.worst_gap import Gap, worst_gap
from tests.support.stub_llm import PROMPT, read, says

pytestmark = pytest.mark.clock

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


MS = 1_000_000


@pytest.fixture(scope="module")
def minutes() -> tuple[StepHistory, list[StepRecord]]:
    """Two minutes of steps, 200 a second; in each that is divisible by 10 somebody's prompt."""
    records = []
    for number in range(24_000):
        at = 5 * MS * number
        prompt = 32 if number % 10 == 0 else 0
        preempted = int(number == 6_100)
        times = (at, at + 1000, at + 2000, at + 4 * MS, at + 4 * MS + 1000)
        records.append(StepRecord(number, *times, decode_rows=8, prefill_tokens=prompt, preempted=preempted))
    history = StepHistory()
    history.add(records)
    return history, records


@pytest.mark.parametrize(
    ("gap", "stamps", "cause"),
    [
        # He had taken nothing for a minute.
        (Gap(9, 30_004 * MS, 30_005 * MS, 30_010 * MS, 90_000 * MS, 90_001 * MS), [], "write"),
        # The API process stood still for a minute.
        (Gap(9, 30_004 * MS, 30_005 * MS, 30_010 * MS, 30_010 * MS, 90_001 * MS), [], "api"),
        # It had no place for a minute.
        (
            Gap(9, 30_004 * MS, 30_005 * MS, 90_004 * MS + 2000, 90_004 * MS + 2000, 90_005 * MS),
            [(int(Mark.PREEMPTED), 30_500 * MS)],
            "preemption",
        ),
    ],
)
def test_a_gap_of_a_minute_is_explained_from_a_few_of_its_steps(minutes, gap, stamps, cause):
    history, records = minutes
    steps = steps_of(gap, stamps, history)
    found = worst_gap(gap, stamps, steps, str)
    assert found["cause"] == cause
    assert found == worst_gap(gap, stamps, records[5_700:], str)
    assert len(steps) < 1000
