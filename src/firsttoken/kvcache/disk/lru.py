"""The policy where none is given: least recently used first."""

from __future__ import annotations

import heapq
from itertools import count

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.interface import Shard


class LruPolicy:
    """An `EvictionPolicy` by last use alone; what is to be kept until some time counts as used then.

    A heap of offers. Of each shard only the last one is true (its ticket is ``shard.state``): the others are passed
    over, and thrown out once they are the larger part, so that each call costs O(log shards), amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Shard]] = []
        self._tickets = count()
        self._offered = 0

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        """Its last use is known, and counts when it is offered."""

    def offer(self, shard: Shard, now_ns: int) -> None:
        self._offered += shard.state is None
        shard.state = next(self._tickets)
        heapq.heappush(self._heap, (max(shard.used_ns, shard.keep_until_ns), shard.state, shard))
        if len(self._heap) > 2 * self._offered + 64:
            self._heap = [entry for entry in self._heap if entry[2].state == entry[1]]
            heapq.heapify(self._heap)

    def withdraw(self, shard: Shard) -> None:
        self._offered -= shard.state is not None
        shard.state = None

    def victim(self, now_ns: int) -> Shard | None:
        while self._heap and self._heap[0][2].state != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        self.withdraw(shard)
