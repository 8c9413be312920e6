from __future__ import annotations

import time

import pytest

from firsttoken.core.clock import clock_replaced, now_ns
from firsttoken.core.timeline import Mark, Timeline


def test_it_is_the_monotonic_clock() -> None:
    before = time.monotonic_ns()
    now = now_ns()
    assert before <= now <= time.monotonic_ns()


def test_stamps_are_of_the_replaced_clock_within_its_scope_only() -> None:
    timeline = Timeline()
    with clock_replaced(lambda: 42):
        assert now_ns() == 42
        timeline.stamp(Mark.ARRIVED)
    assert timeline.times == [42]
    assert now_ns() > 42


def test_the_real_clock_is_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="lost"), clock_replaced(lambda: 42):
        raise ValueError("lost")
    assert now_ns() != 42


def test_a_replaced_clock_cannot_be_replaced() -> None:
    with clock_replaced(lambda: 1):
        with pytest.raises(RuntimeError, match="one simulation at a time"), clock_replaced(lambda: 2):
            pass
        assert now_ns() == 1
