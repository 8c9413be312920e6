"""Least frequently used first, uses before an eviction included."""

from __future__ import annotations

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.base import SimplePolicy
from firsttoken.kvcache.eviction.config import EvictionConfig
from firsttoken.kvcache.eviction.ghosts import Ghosts
from firsttoken.kvcache.eviction.interface import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap


class LFU(SimplePolicy):
    """``shard.state`` counts its uses, which a ghost remembers; among equals the least recently used goes first."""

    def __init__(self, config: EvictionConfig) -> None:
        super().__init__()
        self._offered = OfferedHeap()
        self._ghosts: Ghosts[int] = Ghosts(config.ghosts)

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        if shard.state is None:
            before = self._ghosts.take(shard.key)
            shard.state = shard.uses if before is None else before + 1
        else:
            shard.state += 1

    def _add(self, shard: Shard, now_ns: int) -> None:
        self._offered.add(shard, (shard.state, shard.used_ns))

    def _remove(self, shard: Shard) -> None:
        self._offered.remove(shard)

    def _first(self, now_ns: int) -> Shard | None:
        return self._offered.first()

    def _forget(self, shard: Shard, *, evicted: bool) -> None:
        if evicted:
            self._ghosts.add(shard.key, shard.state)
            self._ghosts.trim()
        shard.state = None
