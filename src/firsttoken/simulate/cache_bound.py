"""The bound that no policy can be far above: one that knows the load."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap
from firsttoken.simulate.cache import key_of
from firsttoken.simulate.workload import Job

CLAIRVOYANT = "clairvoyant"
_NEVER = 1 << 62


class Clairvoyant:
    """The shard whose next use is last goes first (L. Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966): optimal where any shard may go, and near to it for leaves, as what is before a shard in its
    chain is used no later. It has no regard for classes."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._uses: dict[bytes, deque[int]] = {}
        for place, job in enumerate(jobs):
            for number in job.blocks:
                self._uses.setdefault(key_of(number), deque()).append(place)
        self._offered = OfferedHeap()
        # Which jobs have been: each comes at a time of its own.
        self._places = iter([place for place, job in enumerate(jobs) if job.blocks])
        self._place = -1
        self._now_ns = -1

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        if now_ns != self._now_ns:
            self._now_ns = now_ns
            self._place = next(self._places)
        uses = self._uses[shard.key]
        while uses and uses[0] <= self._place:
            uses.popleft()

    def offer(self, shard: Shard, now_ns: int) -> None:
        uses = self._uses[shard.key]
        while uses and uses[0] <= self._place:  # those that found no place
            uses.popleft()
        self._offered.add(shard, -(uses[0] if uses else _NEVER))

    def withdraw(self, shard: Shard) -> None:
        self._offered.remove(shard)

    def victim(self, now_ns: int) -> Shard | None:
        return self._offered.first()

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        self._offered.remove(shard)
