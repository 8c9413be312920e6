"""Least recently used first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.interface import Shard

_Entry = tuple[int, int, Shard]
_MIN_STALE = 64


class LRU:
    """The shard whose last use is longest ago; one that is to be kept only where all others are gone too.

    Two heaps, by last use and by when shards need not be kept any more. ``shard.state`` is the number of its entry,
    None while it is not offered; entries with another number are stale, and dropped when they come up or are the most.
    """

    def __init__(self) -> None:
        self._free: list[_Entry] = []
        self._kept: list[_Entry] = []
        self._number = 0
        self._offered = 0

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        """Its last use is known already, and counts when it is offered."""

    def offer(self, shard: Shard, now_ns: int) -> None:
        self._number += 1
        self._offered += 1
        shard.state = self._number
        if shard.keep_until_ns > now_ns:
            heappush(self._kept, (shard.keep_until_ns, self._number, shard))
        else:
            heappush(self._free, (shard.used_ns, self._number, shard))
        if len(self._free) + len(self._kept) > 2 * self._offered + _MIN_STALE:
            self._free = [entry for entry in self._free if entry[2].state == entry[1]]
            self._kept = [entry for entry in self._kept if entry[2].state == entry[1]]
            heapify(self._free)
            heapify(self._kept)

    def withdraw(self, shard: Shard) -> None:
        self._offered -= 1
        shard.state = None

    def victim(self, now_ns: int) -> Shard | None:
        kept = self._kept
        while _drop_stale(kept) and kept[0][0] <= now_ns:
            _, number, shard = heappop(kept)
            heappush(self._free, (shard.used_ns, number, shard))
        if _drop_stale(self._free):
            return self._free[0][2]
        return kept[0][2] if kept else None

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        if shard.state is not None:
            self.withdraw(shard)


def _drop_stale(heap: list[_Entry]) -> bool:
    """Bring an entry up that is not stale; False when there is none."""
    while heap and heap[0][2].state != heap[0][1]:
        heappop(heap)
    return bool(heap)
