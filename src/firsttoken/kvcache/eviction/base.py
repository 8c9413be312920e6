"""What simple policies share: shards that are pinned go last."""

from __future__ import annotations

from abc import ABC, abstractmethod

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.interface import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap


class SimplePolicy(ABC):
    """An `EvictionPolicy` but for its order: a subclass ranks the offered shards that are not pinned."""

    def __init__(self) -> None:
        self._pinned = OfferedHeap()

    @abstractmethod
    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        """As in `EvictionPolicy`."""

    def offer(self, shard: Shard, now_ns: int) -> None:
        if shard.keep_until_ns > now_ns:
            self._pinned.add(shard, shard.keep_until_ns)
        else:
            self._add(shard, now_ns)

    def withdraw(self, shard: Shard) -> None:
        if not self._pinned.remove(shard):
            self._remove(shard)

    def victim(self, now_ns: int) -> Shard | None:
        if self._pinned:
            for shard in self._pinned.below(now_ns):
                self._add(shard, now_ns)
        return self._first(now_ns) or self._pinned.first()

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        if not self._pinned.remove(shard):
            self._remove(shard)
        self._forget(shard, evicted=evicted)

    @abstractmethod
    def _add(self, shard: Shard, now_ns: int) -> None:
        """It may go from now on, and is not pinned."""

    @abstractmethod
    def _remove(self, shard: Shard) -> None:
        """It may not go any more, if it was added."""

    @abstractmethod
    def _first(self, now_ns: int) -> Shard | None:
        """Which goes next, None when none was added."""

    @abstractmethod
    def _forget(self, shard: Shard, *, evicted: bool) -> None:
        """It is not in the tier any more."""
