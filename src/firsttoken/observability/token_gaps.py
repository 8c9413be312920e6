"""Gaps between tokens: the one thing that is observed for each token of each stream."""

from __future__ import annotations

from collections import Counter

from firsttoken.core.clock import NS_PER_S
from firsttoken.observability.histogram import Histogram
from firsttoken.observability.live import ClassWindow


class TokenGaps:
    """The gaps between tokens of one service class. A step brings dozens of them, nearly all the same, so they are
    counted a step at a time: to note one is to put a number on a list."""

    __slots__ = ("_histogram", "_noted", "_window", "note")

    def __init__(self, histogram: Histogram, window: ClassWindow) -> None:
        self._histogram = histogram
        self._window = window
        self._noted: list[int] = []
        self.note = self._noted.append  # (ns)

    def count(self) -> None:
        """Those that were noted since the last time."""
        if not self._noted:
            return
        for ns, times in Counter(self._noted).items():
            self._histogram.observe(ns / NS_PER_S, times)
            self._window.itl.observe(ns / NS_PER_S, times)
        self._noted.clear()
