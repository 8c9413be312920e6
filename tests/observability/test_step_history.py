"""The front end's history of steps: what it keeps, what it finds, what it forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.step_record import StepRecord
from firsttoken.observability.step_history import PIECE, StepHistory

MS = 1_000_000


def record(step: int, ms: float = 1.0) -> StepRecord:
    """Step ``step`` is under way from ``step * ms`` on, for 0.9 of that."""
    at = int(step * ms * MS) + 10**15
    end = at + int(0.9 * ms * MS)
    return StepRecord(step, at, at + 10, at + 20, end - 10, end, decode_rows=step % 7, prefill_requests=(step,))


def at(step: float) -> int:
    return int(step * MS) + 10**15


def filled(count: int, **limits: object) -> StepHistory:
    history = StepHistory(**limits)
    for first in range(0, count, 37):
        history.add([record(step) for step in range(first, min(first + 37, count))])
    return history


def ids(records: list[StepRecord]) -> list[int]:
    return [one.step_id for one in records]


@given(count=st.integers(0, 900), asked=st.integers(-5, 1000), at_hand=st.sampled_from([1, 100, 4096]))
def test_packed_or_not_it_finds_the_same(count, asked, at_hand):
    history = filled(count, at_hand=at_hand)
    steps = list(range(count))
    assert len(history) == count
    assert ids(history.last(asked)) == (steps[-asked:] if asked > 0 else [])
    assert ids(history.since(asked)) == [step for step in steps if step > asked]
    between = ids(history.between(at(asked), at(asked + 50.5)))
    assert between == [step for step in steps if asked <= step <= asked + 50]


def test_what_was_packed_comes_back_as_it_was():
    history = filled(3 * PIECE, at_hand=1)
    assert history.last(3 * PIECE) == [record(step) for step in range(3 * PIECE)]
    assert history.packed_bytes > 0


def test_a_step_counts_as_long_as_it_is_under_way():
    history = filled(10)
    assert ids(history.between(at(3.5), at(3.5))) == [3]
    assert ids(history.between(at(3.95), at(3.97))) == []
    assert ids(history.between(at(3.95), at(5.1))) == [4, 5]


def test_old_steps_are_forgotten_by_age():
    history = filled(20 * PIECE, keep_s=1.0, at_hand=PIECE)
    first = history.since(-1)[0].step_id
    assert 20 * PIECE - 1000 - 2 * PIECE < first <= 20 * PIECE - 1000 + PIECE
    assert len(history) == 20 * PIECE - first


def test_those_at_hand_are_forgotten_by_age_too():
    history = StepHistory(keep_s=10)
    for step in range(100):
        history.add([record(step, 1000.0)])
    assert ids(history.since(-1)) == list(range(89, 100))


def test_memory_is_bounded():
    history = filled(40 * PIECE, max_bytes=100_000, at_hand=PIECE)
    assert 50_000 < history.packed_bytes <= 100_000
    assert ids(history.last(5)) == list(range(40 * PIECE - 5, 40 * PIECE))


@pytest.mark.parametrize("limits", [{"keep_s": 0}, {"max_bytes": 0}, {"at_hand": -1}])
def test_limits_must_be_positive(limits):
    with pytest.raises(ValueError, match="positive"):
        StepHistory(**limits)
