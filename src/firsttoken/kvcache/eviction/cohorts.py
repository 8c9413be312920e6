"""Shards that are ranked alike, because they are of one kind and were used at nearly the same time."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import NamedTuple

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.interface import Shard

# Uses within one slot of time are at one time.
SLOT_NS = 5 * NS_PER_S


class Kind(NamedTuple):
    """What a cohort's shards have in common. ``returns``: the kind whose rate of return is learned; ``cost``: the
    power of two of what a byte costs to recompute, relative to the first shard's."""

    returns: int
    service: ServiceClass
    cost: int


class Cohort:
    """``watched`` shards of one kind used around ``used_ns``, resident or not; ``offered`` are those that may go.

    ``age_bin`` holds until ``due_ns``, and was entered with ``weight``. ``entry`` is the number of its valid entry
    among the ranked, 0 for none. ``kept_until_ns``: until then its shards are kept.
    """

    __slots__ = ("age_bin", "due_ns", "entry", "kept_until_ns", "kind", "offered", "used_ns", "watched", "weight")

    def __init__(self, kind: Kind, used_ns: int, kept_until_ns: int, weight: float) -> None:
        self.kind = kind
        self.used_ns = used_ns
        self.kept_until_ns = kept_until_ns
        self.weight = weight
        self.age_bin = 0
        self.due_ns = 0
        self.entry = 0
        self.watched = 0
        self.offered: OrderedDict[Shard, None] = OrderedDict()


Rank = tuple[int, float]


class RankedCohorts:
    """Cohorts with shards on offer by rank, lowest first. Entries that are not valid any more are dropped as they come
    up: each was pushed once, so all calls are O(log cohorts), amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Cohort]] = []
        self._number = 0

    def put(self, cohort: Cohort, rank: Rank) -> None:
        """Rank it, anew if it was ranked."""
        self._number += 1
        cohort.entry = self._number
        heappush(self._heap, (rank, self._number, cohort))

    def first(self) -> Cohort | None:
        """The lowest that has shards on offer."""
        heap = self._heap
        while heap:
            _, number, cohort = heap[0]
            if cohort.entry == number:
                if cohort.offered:
                    return cohort
                cohort.entry = 0
            heappop(heap)
        return None
