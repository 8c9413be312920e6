"""S3-FIFO: a small queue for what is new, a main queue for what was used again or came back.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, with its numbers: a tenth for the small
queue, uses counted up to three, two of them to be promoted. What may not go is passed over.
"""

from __future__ import annotations

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.base import SimplePolicy
from firsttoken.kvcache.eviction.ghosts import Ghosts
from firsttoken.kvcache.eviction.interface import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap

_SMALL_SHARE = 0.1
_MOST_USES = 3
_PROMOTED = 2


class _Place:
    """``main``: in the main queue; ``number``: its place there or in the small one; ``uses`` since it came."""

    __slots__ = ("main", "number", "uses")

    def __init__(self, main: bool, number: int) -> None:
        self.main = main
        self.number = number
        self.uses = 0


class S3FIFO(SimplePolicy):
    """``shard.state`` is its place. As many ghosts are kept as shards were in the main queue at most."""

    def __init__(self) -> None:
        super().__init__()
        self._small = OfferedHeap()
        self._main = OfferedHeap()
        self._ghosts: Ghosts[None] = Ghosts(0)
        self._number = 0
        self._num_small = 0
        self._num_main = 0

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        place: _Place | None = shard.state
        if place is not None:
            place.uses = min(_MOST_USES, place.uses + 1)
            return
        self._number += 1
        main = shard.key in self._ghosts
        self._ghosts.take(shard.key)
        shard.state = _Place(main, self._number)
        if main:
            self._num_main += 1
        else:
            self._num_small += 1
        self._ghosts.limit = max(self._ghosts.limit, self._num_main, self._num_small)

    def _add(self, shard: Shard, now_ns: int) -> None:
        place: _Place = shard.state
        (self._main if place.main else self._small).add(shard, place.number)

    def _remove(self, shard: Shard) -> None:
        place: _Place = shard.state
        (self._main if place.main else self._small).remove(shard)

    def _first(self, now_ns: int) -> Shard | None:
        # Each turn ends, moves a shard to the main queue for good, or takes one of at most three uses from it.
        while self._small or self._main:
            crowded = self._num_small > _SMALL_SHARE * (self._num_small + self._num_main)
            if self._small and (crowded or not self._main):
                shard = self._small.first()
                if shard is None or shard.state.uses < _PROMOTED:
                    return shard
                self._small.remove(shard)
                self._num_small -= 1
                self._num_main += 1
                shard.state.main = True
                shard.state.uses = 0
            else:
                shard = self._main.first()
                if shard is None or not shard.state.uses:
                    return shard
                self._main.remove(shard)
                shard.state.uses -= 1
            self._number += 1
            shard.state.number = self._number
            self._main.add(shard, self._number)
        return None

    def _forget(self, shard: Shard, *, evicted: bool) -> None:
        place: _Place = shard.state
        if place.main:
            self._num_main -= 1
        else:
            self._num_small -= 1
            if evicted:
                self._ghosts.add(shard.key, None)
                self._ghosts.trim()
        shard.state = None
