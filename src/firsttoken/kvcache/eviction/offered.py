"""Shards on offer in an order."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

from firsttoken.kvcache.eviction.interface import Shard

_MIN_STALE = 64


class OfferedHeap:
    """By ranks that are given with the shards and comparable with each other; who came first, where they are equal.

    ``entries`` has the shards. O(log shards) a call, amortised: what the heap has of shards that were removed is
    dropped as it comes up, or once it is the most.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Shard]] = []
        self.entries: dict[Shard, int] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, shard: Shard) -> bool:
        return shard in self.entries

    def add(self, shard: Shard, rank: Any) -> None:
        self._number += 1
        self.entries[shard] = self._number
        heappush(self._heap, (rank, self._number, shard))
        if len(self._heap) > 2 * len(self.entries) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self.entries.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def remove(self, shard: Shard) -> bool:
        """False where it is not among them."""
        return self.entries.pop(shard, None) is not None

    def first(self) -> Shard | None:
        """The lowest, which stays."""
        heap = self._heap
        while heap:
            _, number, shard = heap[0]
            if self.entries.get(shard) == number:
                return shard
            heappop(heap)
        return None

    def below(self, rank: Any) -> list[Shard]:
        """Take out all up to a rank, lowest first."""
        found: list[Shard] = []
        while (shard := self.first()) is not None and self._heap[0][0] <= rank:
            del self.entries[shard]
            found.append(shard)
        return found
