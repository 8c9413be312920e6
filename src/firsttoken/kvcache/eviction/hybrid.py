"""The hybrid that the engine was specified with: a sliding window of uses, and age weighted by class.

What has fewer than ``window_uses`` uses in the last ``window_s``, or was not used for ``max_age_s``, goes before the
rest; shards of p0 need no uses in the window. On either side the greatest age goes first, divided by class weights.
"""

from __future__ import annotations

from collections import deque

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.base import SimplePolicy
from firsttoken.kvcache.eviction.config import EvictionConfig
from firsttoken.kvcache.eviction.interface import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap


class _ByClass:
    """One heap a class by last use, so that ages can be weighted when they are compared."""

    def __init__(self, weights: tuple[float, float, float]) -> None:
        self._weights = weights
        self._heaps = tuple(OfferedHeap() for _ in ServiceClass)

    def add(self, shard: Shard) -> None:
        self._heaps[shard.service].add(shard, shard.used_ns)

    def remove(self, shard: Shard) -> None:
        self._heaps[shard.service].remove(shard)

    def first(self, now_ns: int) -> Shard | None:
        found = [shard for heap in self._heaps if (shard := heap.first()) is not None]
        return max(
            found,
            key=lambda shard: ((now_ns - shard.used_ns) / self._weights[shard.service], shard.service),
            default=None,
        )


class Hybrid(SimplePolicy):
    """``shard.state`` has the times of its last uses, as many as the window asks for."""

    def __init__(self, config: EvictionConfig) -> None:
        super().__init__()
        self._window_ns = round(config.window_s * NS_PER_S)
        self._window_uses = config.window_uses
        self._max_age_ns = round(config.max_age_s * NS_PER_S)
        self._cold = _ByClass(config.weights)
        self._hot = _ByClass(config.weights)
        self._cooling = OfferedHeap()

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        if shard.state is None:
            shard.state = deque(maxlen=self._window_uses)
        shard.state.append(now_ns)

    def _add(self, shard: Shard, now_ns: int) -> None:
        until_ns = self._hot_until(shard)
        if until_ns > now_ns:
            self._hot.add(shard)
            self._cooling.add(shard, until_ns)
        else:
            self._cold.add(shard)

    def _remove(self, shard: Shard) -> None:
        if self._cooling.remove(shard):
            self._hot.remove(shard)
        else:
            self._cold.remove(shard)

    def _first(self, now_ns: int) -> Shard | None:
        for shard in self._cooling.below(now_ns):
            self._hot.remove(shard)
            self._cold.add(shard)
        return self._cold.first(now_ns) or self._hot.first(now_ns)

    def _forget(self, shard: Shard, *, evicted: bool) -> None:
        shard.state = None

    def _hot_until(self, shard: Shard) -> int:
        old_ns = shard.used_ns + self._max_age_ns
        if shard.service == ServiceClass.P0:
            return old_ns
        uses: deque[int] = shard.state
        return min(old_ns, uses[0] + self._window_ns) if len(uses) == self._window_uses else 0
