"""One gap of each cause, made of constructed records, and what is told of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.step_record import StepRecord
from firsttoken.core.timeline import Mark
from firsttoken.observability.worst_gap import Gap, worst_gap

MS = NS_PER_MS
TICK = MS // 10  # from one step to the next, and from a result to its consumer


def step(number: int, began: int, ms: float, **fields: Any) -> StepRecord:
    ended = began + round(ms * MS)
    fields = {"decode_rows": 4, "captured": True} | fields
    return StepRecord(number, began - TICK, began - TICK // 2, began, ended, ended, **fields)


def usual(count: int = 10, ms: float = 2) -> list[StepRecord]:
    """Steps of 2 ms, one after the other; the last one's token is at its consumer at `after`."""
    made: list[StepRecord] = []
    at = 1000 * MS
    for number in range(count):
        made.append(step(number, at, ms))
        at = made[-1].ended_ns + TICK
    return made


def explained(
    *fresh: StepRecord,
    before: list[StepRecord] | None = None,
    late: float = 0,
    away: float = 0,
    stamps: Any = (),
    whose: Any = lambda id_: f"request r{id_}",
) -> dict[str, Any]:
    """Of the gap that ends with the last of ``fresh``; the token came ``late`` ms to this process, and its consumer was
    ``away`` for so long after that."""
    before = usual() if before is None else before
    steps = [*before, *fresh]
    start = before[-1].harvested_ns + TICK
    arrived = steps[-1].harvested_ns + TICK // 2 + round(late * MS)
    came = arrived + round(away * MS) if away else start
    gap = Gap(7, start - TICK // 2, start, arrived, came, max(arrived, came) + TICK // 2)
    told = worst_gap(gap, stamps, steps, whose)
    assert sum(told["parts_ms"].values()) == pytest.approx(told["ms"], abs=1e-9)
    assert min(told["parts_ms"].values()) > 0
    assert told["token"] == 7
    return told


def after(steps: list[StepRecord]) -> int:
    return steps[-1].ended_ns + TICK


def test_anothers_prefill_is_named_as_far_as_it_may_be_known():
    at = after(usual())
    told = explained(step(10, at, 12, prefill_tokens=512, prefill_requests=(3, 4)))
    assert (told["cause"], told["step"]) == ("prefill", 10)
    assert told["parts_ms"]["prefill"] == pytest.approx(10)
    assert "512 prompt tokens (request r3, request r4)" in told["detail"]
    told = explained(step(10, at, 12, prefill_tokens=512, prefill_requests=(3, 4)), whose=lambda _: "another caller's")
    assert "(another caller's)" in told["detail"]


def test_the_step_that_had_most_of_it_is_named():
    at = after(usual())
    first = step(10, at, 2.5, prefill_tokens=16, decode_rows=0)
    second = step(11, after([first]), 30, prefill_tokens=2048, decode_rows=0)
    third = step(12, after([second]), 2)
    told = explained(first, second, third)
    assert (told["cause"], told["step"]) == ("prefill", 11)
    assert "2048" in told["detail"]


def test_own_preemption():
    at = after(usual())
    taken = at + TICK
    steps = [step(10, at, 2, preempted=1), step(11, at + 3 * MS, 20), step(12, at + 24 * MS, 9, prefill_tokens=40)]
    told = explained(*steps, stamps=[(Mark.FIRST_TOKEN, 5), (Mark.PREEMPTED, taken), (Mark.SCHEDULED, at + 23 * MS)])
    assert (told["cause"], told["step"]) == ("preemption", 10)
    assert told["parts_ms"]["preemption"] > 30


def test_garbage_collection():
    told = explained(step(10, after(usual()) + 30 * MS, 2, gc_ns=28 * MS))
    assert (told["cause"], told["step"]) == ("gc", 10)
    assert told["parts_ms"]["gc"] == pytest.approx(28)


def test_garbage_collection_inside_a_step():
    told = explained(step(10, after(usual()), 40, gc_ns=28 * MS))
    assert told["cause"] == "gc"


def test_the_wait_for_a_processor():
    told = explained(step(10, after(usual()) + 30 * MS, 2, run_queue_ns=25 * MS))
    assert (told["cause"], told["parts_ms"]["run_queue"]) == ("run_queue", pytest.approx(25))


def test_a_copy_of_kv():
    told = explained(step(10, after(usual()), 9, copied_bytes_out=64 << 20, copy_ns=6 * MS))
    assert (told["cause"], told["parts_ms"]["kv_copy"]) == ("kv_copy", pytest.approx(7))
    assert "64.0 MiB" in told["detail"]


def test_a_step_without_a_graph():
    told = explained(step(10, after(usual()), 9, captured=False))
    assert (told["cause"], told["step"]) == ("graph_miss", 10)


def test_where_there_are_no_graphs_none_is_missed():
    before = [step(one.step_id, one.started_ns, 2, captured=False) for one in usual()]
    assert explained(step(10, after(before), 9, captured=False), before=before)["cause"] == "unexplained"


def test_a_larger_batch():
    told = explained(step(10, after(usual()), 9, decode_rows=64))
    assert told["cause"] == "batch"
    assert "64 rows" in told["detail"]


def test_the_engines_loop():
    told = explained(step(10, after(usual()) + 30 * MS, 2))
    assert (told["cause"], told["step"]) == ("host", 10)
    assert told["parts_ms"]["host"] == pytest.approx(30, abs=0.3)


def test_the_api_process():
    told = explained(step(10, after(usual()), 2), late=40)
    assert told["cause"] == "api"
    assert told["parts_ms"]["api"] == pytest.approx(40, abs=0.3)


def test_what_the_engine_did_while_the_api_process_was_late_is_no_cause():
    before = usual(10)
    first = step(10, after(before), 2)
    start = before[-1].harvested_ns + TICK
    more = usual(30)[11:]
    arrived = more[-1].harvested_ns + TICK
    told = worst_gap(Gap(7, start - TICK, start, arrived, start, arrived), [], [*before, first, *more], str)
    assert (told["cause"], told["step"]) == ("api", 10)
    assert told["parts_ms"]["api"] == pytest.approx((arrived - first.harvested_ns) / MS)


def test_the_callers_slow_reading():
    told = explained(step(10, after(usual()), 2), away=40)
    assert told["cause"] == "write"
    assert told["parts_ms"]["write"] == pytest.approx(40)


def test_a_step_that_took_long_for_no_reason():
    told = explained(step(10, after(usual()), 30))
    assert (told["cause"], told["step"]) == ("unexplained", 10)
    assert told["parts_ms"]["unexplained"] == pytest.approx(28)


def test_nothing_stands_out():
    assert explained(step(10, after(usual()), 2.05))["cause"] == "decode"


def test_no_records():
    told = worst_gap(Gap(3, 0, 0, 30 * MS, 1, 31 * MS), [], [], str)
    assert (told["cause"], told["step"]) == ("unexplained", None)
    assert "no record" in told["detail"]


def test_tokens_of_one_step_that_came_apart_were_kept_by_the_api_process():
    before = usual()
    end = before[-1].harvested_ns
    told = worst_gap(Gap(3, end + TICK, end + MS, end + 9 * MS, end, end + 10 * MS), [], before, str)
    assert (told["cause"], told["step"]) == ("api", 9)
    assert told["parts_ms"] == {"api": 9}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_parts_are_the_whole_whatever_the_records_say(data: st.DataObject):
    times = st.integers(0, 40 * MS)
    at = 0
    steps = []
    for number in range(data.draw(st.integers(0, 6))):
        planned = at + data.draw(times) // 4
        marks = sorted(planned + data.draw(times) for _ in range(4))
        at = marks[-1]
        fields = {
            name: data.draw(st.sampled_from([0, most]))
            for name, most in (("prefill_tokens", 9), ("gc_ns", 50 * MS), ("run_queue_ns", 50 * MS), ("decode_rows", 9))
        }
        steps.append(StepRecord(number, planned, *marks, **fields))
    start, arrived, came, end = sorted(data.draw(st.integers(0, 300 * MS)) for _ in range(4))
    arrived, came = data.draw(st.sampled_from([(arrived, came), (came, arrived), (arrived, start - 5)]))
    stamps = [(int(Mark.PREEMPTED), data.draw(st.integers(0, 300 * MS)))] if data.draw(st.booleans()) else []
    told = worst_gap(Gap(1, data.draw(st.integers(0, start)), start, arrived, came, end), stamps, steps, str)
    assert sum(told["parts_ms"].values()) == pytest.approx(told["ms"], abs=1e-9)
    assert all(ms > 0 for ms in told["parts_ms"].values())
