"""The one clock. Every stamp in the system is CLOCK_MONOTONIC in nanoseconds.

On Linux and macOS that clock is shared by all processes of a host, so a stamp taken in the API process and one
taken in the engine process may be subtracted from each other.

A simulation puts another clock in its place (`clock_replaced`), so that the scheduler stamps virtual time by the same
code as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

Clock = Callable[[], int]
"""Reads the time in nanoseconds; never goes back."""

_read: Clock = monotonic_ns


def now_ns() -> int:
    """Nanoseconds on the clock."""
    return _read()


@contextmanager
def clock_replaced(clock: Clock) -> Iterator[None]:
    """Within this scope `now_ns` reads ``clock``, in every thread of the process.

    Raises `RuntimeError` within such a scope: whose time would it be?
    """
    global _read
    if _read is not monotonic_ns:
        raise RuntimeError("the clock is replaced already; one simulation at a time")
    _read = clock
    try:
        yield
    finally:
        _read = monotonic_ns
