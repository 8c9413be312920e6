"""200 callers at a server in processes of its own, over real connections; and attacks on its service classes."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from benchmarks.overload_http import (
    ROWS,
    TARGETS,
    Address,
    Answer,
    ask,
    at_rest,
    left_over,
    metrics,
    overload,
    server,
)

KEYED = """\
[class.p0]
max_queue = "10ms"
[class.p2]
starts_within = "4s"
max_waiting = 40
[keys]
gold = { share = 1.0 }
flood = { max_class = "p2" }
calm = { max_class = "p2" }
"""
KEYS = ("--api-key", "gold=g", "--api-key", "flood=f", "--api-key", "calm=c", "--api-key", "plain")


def body(tokens: int, number: int = 0, length: int = 32, **fields: Any) -> dict[str, Any]:
    prompt = random.Random(number).choices(range(3, 200), k=length)
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


@asynccontextmanager
async def keyed(*options: str, rows: int = 2) -> AsyncIterator[tuple[Address, Address, Address]]:
    """A server as the keys gold, flood and calm see it."""
    async with server(KEYED, *KEYS, "--max-num-seqs", str(rows), *options) as (to, _):
        yield Address(to.port, "g"), Address(to.port, "f"), Address(to.port, "c")


async def until(to: Address, timeout_s: float = 10.0, **least: float) -> None:
    """Wait until this many requests run, or wait."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = await metrics(to)
        if all(found[f"firsttoken_requests_{name}"] >= value for name, value in least.items()):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"never {least}")


async def assert_clean(to: Address) -> None:
    found = await at_rest(to)
    assert not any(left_over(found).values()), left_over(found)


# ------------------------------------------------------------------------- overload


@pytest.mark.clock
async def test_two_hundred_callers() -> None:
    async with server(TARGETS, "--max-num-seqs", str(ROWS)) as (to, _):
        found = await overload(to, clients=200, rounds=3, seed=1)
    assert found["pass"], (found["checks"], found["faults"])
    answered = found["answered"]
    assert set(answered["p0"]) == {"200"}
    assert answered["p2"]["200"] > 20
    assert answered["p2"]["429"] > 20
    assert answered["p2"]["left"] + answered["p1"]["left"] > 80
    assert found["preemptions"] > 0, "p0 met no crowd"
    assert found["ttft_ms"]["p0"]["p90"] < found["ttft_ms"]["p2"]["p50"] / 3


def test_what_is_no_answer_is_told() -> None:
    good = Answer("p2", status=200, finish="length", complete=True)
    assert good.fault is None
    assert Answer("p2", status=429, retry_after="1", complete=True).fault is None
    for bad in (
        Answer("p2"),
        Answer("p2", status=200, complete=True),
        Answer("p2", status=200, finish="length"),
        Answer("p2", status=429, complete=True),
        Answer("p2", status=429, retry_after="0", complete=True),
        Answer("p2", status=500, complete=True),
    ):
        assert bad.fault is not None


# -------------------------------------------------------------------------- attacks


@pytest.mark.clock
async def test_a_flood_of_one_key_leaves_another_of_its_class_its_part() -> None:
    async with keyed() as (gold, flood, calm):
        await ask(calm, body(2))
        crowd = [asyncio.create_task(ask(flood, body(32, number))) for number in range(150)]
        await until(gold, waiting=35)
        calm_answers = [await ask(calm, body(2, 1000 + number)) for number in range(6)]
        answers = await asyncio.gather(*crowd)
        assert [answer.status for answer in calm_answers] == [200] * 6
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) == {200, 429}
        assert statuses[429] > 50
        last = max(answer.ttft_ms or 0.0 for answer in answers)
        assert max(answer.ttft_ms or 0.0 for answer in calm_answers) < last / 3
        await assert_clean(gold)


@pytest.mark.clock
async def test_a_flood_of_p0_lets_p2_start_in_time() -> None:
    async with keyed() as (gold, _, calm):
        stop = time.monotonic() + 7

        async def press(number: int) -> list[Answer]:
            answers = []
            while time.monotonic() < stop:
                answers.append(await ask(gold, body(24, 1000 * number + len(answers), service_tier="p0")))
            return answers

        flood = [asyncio.create_task(press(number)) for number in range(6)]
        await until(gold, running=2, waiting=2)
        asked = time.monotonic()
        late = await asyncio.gather(*(ask(calm, body(4, 77 + number)) for number in range(3)))
        pressed = [answer for answers in await asyncio.gather(*flood) for answer in answers]
        assert [answer.status for answer in late] == [200] * 3
        longest_ms = max(answer.ttft_ms or 0.0 for answer in late)
        # Of its first token, that is: after that a better class may take its place again.
        assert asked + longest_ms / 1000 < stop, "the flood was over before"
        assert longest_ms < 4000 + 500
        assert {answer.status for answer in pressed} == {200}
        await assert_clean(gold)


async def test_under_kv_pressure_p0_starts_and_p2_has_its_text_all_the_same() -> None:
    """KV for about two of the requests, so that each p0 takes the place of a p2 midway."""
    prompts = [body(120, number, length=200) for number in range(6)]
    async with keyed("--kv-memory", "704KiB", rows=8) as (gold, flood, _):
        alone = [(await ask(flood, one)).tokens for one in prompts]
        assert all(len(tokens) == 120 for tokens in alone)
        before = (await metrics(gold))["firsttoken_preemptions_total"]
        crowd = [asyncio.create_task(ask(flood, one)) for one in prompts]
        await until(gold, running=2)
        first = [await ask(gold, body(8, 500 + number, length=400, service_tier="p0")) for number in range(8)]
        together = await asyncio.gather(*crowd)
        assert [answer.status for answer in first] == [200] * 8
        assert [answer.tokens for answer in together] == alone
        found = await at_rest(gold)
        assert found["firsttoken_preemptions_total"] > before
        assert not any(left_over(found).values())


async def test_waiting_requests_leave_by_the_thousands() -> None:
    async with keyed() as (gold, flood, calm):
        holding = [asyncio.create_task(ask(flood, body(400, number))) for number in range(2)]
        await until(gold, running=2)
        for turn in range(20):
            await asyncio.gather(*(ask(flood, body(100, 100 * turn + n), leave_after=0) for n in range(100)))
        assert (await ask(calm, body(2, 9))).status == 200
        assert {answer.status for answer in await asyncio.gather(*holding)} == {200}
        await assert_clean(gold)


async def test_several_answers_of_a_class_start_or_are_refused_together() -> None:
    async with keyed() as (gold, flood, _):
        holding = [asyncio.create_task(ask(flood, body(300, number))) for number in range(2)]
        await until(gold, running=2)
        sampled = {"temperature": 1.0, "n": 30}
        waits = asyncio.create_task(ask(flood, body(3, 5, **sampled)))
        await until(gold, waiting=30)
        refused = await ask(flood, body(3, 6, **sampled))
        assert (refused.status, refused.fault) == (429, None)
        assert (await ask(gold, body(3, 7, service_tier="p0", **sampled))).status == 200
        several = await waits
        assert (several.status, len(several.tokens)) == (200, 90)
        await asyncio.gather(*holding)
        await assert_clean(gold)


async def test_a_drain_with_a_queue_answers_everybody_once() -> None:
    async with server(KEYED, *KEYS, "--max-num-seqs", "2") as (to, process):
        flood, gold = Address(to.port, "f"), Address(to.port, "g")
        crowd = [asyncio.create_task(ask(flood, body(40, number))) for number in range(20)]
        await until(gold, running=2, waiting=10)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        late = await ask(gold, body(2, 99))
        assert (late.status, late.complete) == (503, True)
        answers = await asyncio.gather(*crowd)
        assert [(answer.status, len(answer.tokens)) for answer in answers] == [(200, 40)] * 20
        assert await asyncio.wait_for(process.wait(), 5) == 0


# ---------------------------------------------------------------- what is asked for

WRONG = [
    ({"service_tier": value}, 400) for value in (1, 0, True, [], ["p0"], {}, "", "P0", "p0 ", "p3", "p-1", "p0\u0000")
]
WRONG += [({"deadline_ms": value}, 400) for value in (0, -1, -1e308, 1e308, 86_400_001, 10**30, "5", True, [], {})]
WRONG += [({"priority": value}, 400) for value in (2**31, -(2**31) - 1, 10**30, 1e300, 0.5, "1", True, [])]
RIGHT = [{"deadline_ms": 86_400_000}, {"priority": 2**31 - 1}, {"priority": -(2**31)}, {"priority": 3.0}]
RIGHT += [{"service_tier": None, "deadline_ms": None, "priority": None}]


async def test_terms_that_mean_nothing_are_refused_by_name() -> None:
    async with keyed() as (gold, flood, calm):
        for fields, status in WRONG:
            answer = await ask(calm, body(2, **fields))
            assert (answer.status, answer.complete) == (status, True), fields
        for fields in RIGHT:
            assert (await ask(calm, body(2, **fields))).status == 200, fields
        for tier in ("p0", "p1", "priority", "fast"):
            assert (await ask(flood, body(2, service_tier=tier))).status == 403
        # A key without a rule of its own may ask for everything.
        assert (await ask(Address(gold.port, "plain"), body(2, service_tier="p0"))).status == 200
        assert (await ask(Address(gold.port), body(2))).status == 401
        await assert_clean(gold)


async def test_a_deadline_is_for_the_start_only() -> None:
    async with keyed() as (gold, _, calm):
        # It has started long before, and goes on past its deadline.
        began = time.monotonic()
        slow = await ask(calm, body(400, deadline_ms=250))
        assert (slow.status, len(slow.tokens)) == (200, 400)
        assert time.monotonic() - began > 0.25
        assert (await ask(calm, body(2, 1, deadline_ms=1e-9))).status == 504
        await assert_clean(gold)
