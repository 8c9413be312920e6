"""How many gaps are how long: bins that each are a fixed factor wider than the one before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FACTOR = 10 ** (1 / 8)
_LEAST_MS = 0.01  # shorter gaps are none: the tokens came together
_MOST_BINS = 32


@dataclass(frozen=True)
class Bin:
    low_ms: float
    high_ms: float
    count: int


def histogram(gaps_ms: Sequence[float]) -> list[Bin]:
    """From the bin of the shortest gap to that of the longest, empty ones between them too; [] without gaps."""
    if not gaps_ms:
        return []
    places = [_place(gap) for gap in gaps_ms]
    step = 1 + (max(places) - min(places)) // _MOST_BINS
    counts: dict[int, int] = {}
    for place in places:
        counts[place // step] = counts.get(place // step, 0) + 1
    return [
        Bin(_edge(number * step), _edge((number + 1) * step), counts.get(number, 0))
        for number in range(min(counts), max(counts) + 1)
    ]


def _place(gap_ms: float) -> int:
    return math.floor(math.log(max(gap_ms, _LEAST_MS) / _LEAST_MS, _FACTOR) + 1e-9)


def _edge(place: int) -> float:
    return _LEAST_MS * _FACTOR**place
