"""Every answer that was started is counted once when it ends, as its caller saw it end."""

from __future__ import annotations

import asyncio

import pytest

from firsttoken.core.errors import EngineDead, FirstTokenError, Overloaded
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.stub import Fault
from firsttoken.transport.messages import Refused
from tests.support.stub_llm import PROMPT, read, says, settle

P2 = {"service_class": "p2"}


def counts(llm):
    """(started, finished, aborted, failed)"""
    value = llm.metrics.registry.get_sample_value
    ended = [
        value("firsttoken_requests_ended_total", {"outcome": name, **P2}) for name in ("finished", "aborted", "failed")
    ]
    return (value("firsttoken_requests_started_total", P2), *ended)


async def test_length_and_end_token_finish(serve):
    llm = await serve(says("hello"))
    await read(llm.open(PROMPT, SamplingParams(max_tokens=2)))
    await read(llm.open(PROMPT, SamplingParams(max_tokens=50, n=3)))
    assert counts(llm) == (4, 4, 0, 0)


async def test_a_stop_string_finishes_though_the_engine_is_told_to_abort(serve):
    llm = await serve(says("hello" * 100), step_s=0.002)
    await read(llm.open(PROMPT, SamplingParams(max_tokens=400, stop="ell")))
    assert counts(llm) == (1, 1, 0, 0)
    await settle(llm, aborted=1)


async def test_leaving_aborts_what_has_not_been_given_out(serve):
    llm = await serve(lambda request: [97] * 4000, step_s=0.002)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=None, n=2))
    await anext(generation)
    generation.cancel()
    generation.cancel()
    assert counts(llm) == (2, 0, 2, 0)
    await read(generation)
    assert counts(llm) == (2, 0, 2, 0)


async def test_leaving_after_the_engine_ended_counts_too(serve):
    llm = await serve(says("hi"))
    generation = llm.open(PROMPT, SamplingParams())
    await settle(llm, finished=1)
    generation.cancel()
    assert counts(llm) == (1, 0, 1, 0)


async def test_failures_and_refusals(serve):
    llm = await serve(says([97, Fault("boom")]), kv_blocks=2)
    for params in (SamplingParams(n=2), SamplingParams(max_tokens=40)):
        with pytest.raises(FirstTokenError):
            await read(llm.open(PROMPT, params))
    assert counts(llm) == (3, 0, 0, 2)
    value = llm.metrics.registry.get_sample_value
    assert value("firsttoken_requests_ended_total", {"outcome": "refused", **P2}) == 1, "it can never fit"
    assert value("firsttoken_request_duration_seconds_count", P2) == 0


async def test_who_was_turned_away_for_want_of_room_did_not_fail(serve):
    llm = await serve(says("hello"), step_s=10)
    generation = llm.open(PROMPT, SamplingParams(n=2))
    await asyncio.sleep(0)
    for number in (1, 2):
        generation.refuse(Refused(number, "full", code="overloaded", retry_after_s=7))
    with pytest.raises(Overloaded, match="full") as caught:
        await read(generation)
    assert caught.value.retry_after_s == 7
    assert counts(llm) == (2, 0, 0, 0)
    value = llm.metrics.registry.get_sample_value
    assert value("firsttoken_requests_ended_total", {"outcome": "refused", **P2}) == 2
    assert value("firsttoken_request_duration_seconds_count", P2) == 0


@pytest.mark.parametrize("silent", [True, False])
async def test_the_engines_death_leaves_nothing_open(serve, silent):
    def script(request):
        return [97, 98, Fault("out of memory", fatal=True, silent=silent)] if request.prompt[0] == 65 else [99] * 4000

    llm = await serve(script, step_s=0.002)
    bystanders = [asyncio.create_task(read(llm.open(PROMPT, SamplingParams(max_tokens=None, n=2)))) for _ in range(3)]
    with pytest.raises(EngineDead):
        await read(llm.open(type(PROMPT)("I", [65]), SamplingParams()))
    assert all(isinstance(error, EngineDead) for error in await asyncio.gather(*bystanders, return_exceptions=True))
    with pytest.raises(EngineDead):
        llm.open(PROMPT, SamplingParams())
    started, finished, aborted, failed = counts(llm)
    assert (started, finished, aborted, failed) == (7, 0, 0, 7)
