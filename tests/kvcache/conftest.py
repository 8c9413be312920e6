"""Time that a test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from firsttoken.core.clock import clock_replaced


class Clock:
    """``now`` is in ns."""

    def __init__(self) -> None:
        self.now = 10**12

    def read(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_replaced(clock.read):
        yield clock
