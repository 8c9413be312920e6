"""Deltas that are told where they arrive, and what has to be awaited for it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from firsttoken.core.errors import EngineDead, InvalidRequest, ReaderTooSlow
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass
from firsttoken.frontend import flow as flow_module
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.frontend.flow import flow
from firsttoken.transport.messages import Abort, Refused
from tests.support.byte_tokenizer import GENERATION, byte_tokenizer
from tests.support.driven_engine import DrivenEngine
from tests.support.stub_llm import PROMPT, read, text_of


@pytest.fixture
async def driven(tmp_path):
    engine = DrivenEngine()
    llm = AsyncLLM(engine, tokenizer=byte_tokenizer(tmp_path), generation_config=GENERATION)
    await llm.start()
    yield llm, engine
    await llm.shutdown()


def same(error):
    return error


class Teller:
    """Notes what it is told. While ``slow`` is an event, it has to be awaited."""

    def __init__(self):
        self.told = []
        self.slow = None

    def __call__(self, delta):
        self.told.append(delta.text)
        return None if self.slow is None else self._wait(self.slow)

    async def _wait(self, event):
        await event.wait()


async def begun(llm, engine, tell, *more, renamed=same, **params):
    """A task that flows, with its requests in the engine."""
    opened = [(llm.open(PROMPT, SamplingParams(max_tokens=999, **params)), one, renamed) for one in (tell, *more)]
    task = asyncio.create_task(flow(*opened))
    for _ in range(3):
        await asyncio.sleep(0)
    assert engine.ids
    return task


async def test_a_delta_is_told_within_the_delivery_and_no_task_runs_for_it(driven):
    teller = Teller()
    task = await begun(*driven, teller)
    for number in range(5):
        driven[1].step(str(number))
        assert teller.told == [str(one) for one in range(number + 1)]
    assert not task.done()
    driven[1].step("!", end="length")
    assert teller.told[-1] == "!"
    await asyncio.wait_for(task, 1)


async def test_the_books_are_kept_when_all_of_a_step_have_their_tokens(driven):
    llm, engine = driven
    tellers = Teller(), Teller(), Teller()
    task = await begun(llm, engine, *tellers)
    for _ in range(2):
        engine.step("a")
        await told_to_all(tellers)
    noted = llm.metrics.of(ServiceClass.P2).gaps._noted
    llm.metrics.of(ServiceClass.P2).gaps.count()
    engine.step("b")
    assert (tellers[0].told[-1], noted) == ("b", [])
    await told_to_all(tellers)
    assert len(noted) == 3
    engine.step("c")
    engine.step("d")  # before all have theirs: who waits for the end of that may wait forever
    assert len(noted) == 1
    await told_to_all(tellers)
    assert [one.told[-1] for one in tellers] == ["d", "cd", "cd"]
    assert len(noted) == 6
    task.cancel()


async def told_to_all(tellers):
    for _ in range(len(tellers) + 2):
        await asyncio.sleep(0)


async def test_what_comes_while_something_is_awaited_is_merged_and_told_after_it(driven):
    teller = Teller()
    task = await begun(*driven, teller)
    engine = driven[1]
    event = teller.slow = asyncio.Event()
    engine.step("a")
    teller.slow = None
    for text in ("b", "c", "d"):
        engine.step(text)
        await asyncio.sleep(0)
    assert teller.told == ["a"]
    event.set()
    for _ in range(4):
        await asyncio.sleep(0)
    assert teller.told == ["a", "bcd"]
    engine.step("e")
    assert teller.told[-1] == "e", "it flows again"
    engine.step("f", end="stop")
    await asyncio.wait_for(task, 1)


async def test_what_had_arrived_before_is_told_first(driven):
    llm, engine = driven
    generation = llm.open(PROMPT, SamplingParams(max_tokens=9))
    await asyncio.sleep(0)
    engine.step("a")
    engine.step("b")
    engine.step("c", end="stop")
    teller = Teller()
    await asyncio.wait_for(flow((generation, teller, same)), 1)
    assert teller.told == ["abc"]


async def test_an_error_of_who_tells_is_raised_to_him_and_to_nobody_else(driven):
    llm, engine = driven
    good = Teller()

    def bad(delta):
        raise ValueError("cannot be told")

    first = await begun(llm, engine, bad)
    second = await begun(llm, engine, good)
    engine.step("a")
    for _ in range(3):
        await asyncio.sleep(0)
    engine.step("b")
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="cannot be told"):
        await asyncio.wait_for(first, 1)
    assert good.told == ["a", "b"]
    second.cancel()


async def test_several_are_told_side_by_side_until_all_have_ended(driven):
    one, other = Teller(), Teller()
    task = await begun(*driven, one, other)
    engine = driven[1]
    first, second = engine.ids
    engine.step("a", first)
    engine.step("b", second)
    event = one.slow = asyncio.Event()
    engine.step("c", first, end="stop")
    engine.step("d", second)
    await asyncio.sleep(0)
    assert (one.told, other.told) == (["a", "c"], ["b"]), "while one is awaited nothing is told of the other"
    event.set()
    for _ in range(4):
        await asyncio.sleep(0)
    assert other.told == ["b", "d"]
    assert not task.done()
    engine.step("e", second, end="stop")
    await asyncio.wait_for(task, 1)
    assert other.told == ["b", "d", "e"]


async def test_all_answers_of_one_request_are_told(driven):
    teller = Teller()
    task = await begun(*driven, teller, n=3)
    for _ in range(2):  # the second before the first has gone to all
        driven[1].step("x")
    for _ in range(8):
        await asyncio.sleep(0)
    assert "".join(teller.told) == "x" * 6
    driven[1].step("y", end="stop")
    await asyncio.wait_for(task, 1)
    assert "".join(teller.told) == "x" * 6 + "y" * 3


async def test_a_refusal_is_in_the_callers_words(driven):
    def renamed(error):
        return InvalidRequest(error.message, param="messages", code=error.code)

    task = await begun(*driven, Teller(), renamed=renamed)
    driven[1].tell(Refused(driven[1].ids[0], "too long", "prompt"))
    with pytest.raises(InvalidRequest, match="too long") as caught:
        await asyncio.wait_for(task, 1)
    assert caught.value.param == "messages"


async def test_an_engines_death_is_raised_behind_what_it_said(driven):
    teller = Teller()
    task = await begun(*driven, teller)
    driven[1].step("a")
    driven[1].hang_up()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(task, 1)
    assert teller.told == ["a"]


async def test_nothing_is_left_for_the_collector(driven):
    llm, engine = driven
    gc.collect()
    gc.disable()
    try:
        teller = Teller()
        found = weakref.ref(teller)
        task = await begun(llm, engine, teller)
        engine.step("a")
        engine.step("b", end="stop")
        await asyncio.wait_for(task, 1)
        del teller, task
        await asyncio.sleep(0)
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("handed", [False, True])
async def test_who_is_cancelled_leaves_the_generation_to_others(driven, handed):
    llm, engine = driven
    generation, teller = llm.open(PROMPT, SamplingParams(max_tokens=9)), Teller()
    task = asyncio.create_task(flow((generation, teller, same)))
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="consumer"):
        await anext(generation)
    if handed:
        teller.slow = asyncio.Event()
        engine.step("a")  # its task has not run when it is cancelled
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.step("b", end="stop")
    assert text_of(await read(generation)) == "b"


@pytest.mark.parametrize("logprobs", [None, 20])
async def test_who_takes_nothing_is_kept_for_up_to_a_bound_and_then_given_up(driven, monkeypatch, logprobs):
    monkeypatch.setattr(flow_module, "MOST_WAITING", 100_000)
    llm, engine = driven
    slow, quick, other = Teller(), Teller(), Teller()
    event = slow.slow = asyncio.Event()
    task = await begun(llm, engine, slow, other, logprobs=logprobs)
    neighbour = await begun(llm, engine, quick)
    mine, his = engine.ids[:2], engine.ids[2]
    engine.step("a")
    await asyncio.sleep(0)
    number = 0
    while not any(isinstance(message, Abort) for message in engine.sent):
        number += 1
        assert number < 1000
        engine.step("b")
        await asyncio.sleep(0)
    most = 100_000 // (430 if logprobs is None else 2070) // 2  # two answers wait for him
    assert most <= number <= most + 3
    [abort] = [message for message in engine.sent if isinstance(message, Abort)][:1]
    assert set(abort.ids) <= set(mine)
    slow.slow = None
    event.set()
    with pytest.raises(ReaderTooSlow, match="reads too slowly"):
        await asyncio.wait_for(task, 1)
    assert slow.told == ["a"]  # what waited has been dropped
    engine.step("!", his, end="stop")
    await asyncio.wait_for(neighbour, 1)
    assert "".join(quick.told) == "a" + "b" * number + "!"
