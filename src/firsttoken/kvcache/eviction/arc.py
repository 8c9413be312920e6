"""ARC: recency and frequency share the tier, and ghosts of each say which of them should have more.

N. Megiddo and D. S. Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003. Its size
is what is resident; a shard that may not go is passed over, which the original does not know.
"""

from __future__ import annotations

from enum import Enum

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.base import SimplePolicy
from firsttoken.kvcache.eviction.ghosts import Ghosts
from firsttoken.kvcache.eviction.interface import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap


class _Seen(Enum):
    ONCE = 0
    OFTEN = 1


class ARC(SimplePolicy):
    """``shard.state`` is the list that it is in. Each list has as many ghosts as shards were resident at most."""

    def __init__(self) -> None:
        super().__init__()
        self._offered = {seen: OfferedHeap() for seen in _Seen}
        self._sizes = dict.fromkeys(_Seen, 0)
        self._ghosts: dict[_Seen, Ghosts[None]] = {seen: Ghosts(0) for seen in _Seen}
        self._target = 0.0  # of shards seen once
        self._most = 0

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        if shard.state is None:
            self._arrives(shard)
        elif shard.state is _Seen.ONCE:
            self._sizes[_Seen.ONCE] -= 1
            self._join(shard, _Seen.OFTEN)

    def _arrives(self, shard: Shard) -> None:
        once, often = self._ghosts[_Seen.ONCE], self._ghosts[_Seen.OFTEN]
        if shard.key in once:
            self._target = min(self._most, self._target + max(1.0, len(often) / len(once)))
        elif shard.key in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(often)))
        known = shard.key in once or shard.key in often
        once.take(shard.key)
        often.take(shard.key)
        self._join(shard, _Seen.OFTEN if known else _Seen.ONCE)
        self._most = max(self._most, sum(self._sizes.values()))
        for ghosts in self._ghosts.values():
            ghosts.limit = self._most

    def _join(self, shard: Shard, seen: _Seen) -> None:
        shard.state = seen
        self._sizes[seen] += 1

    def _add(self, shard: Shard, now_ns: int) -> None:
        self._offered[shard.state].add(shard, shard.used_ns)

    def _remove(self, shard: Shard) -> None:
        self._offered[shard.state].remove(shard)

    def _first(self, now_ns: int) -> Shard | None:
        once = self._sizes[_Seen.ONCE] > self._target
        first, other = (_Seen.ONCE, _Seen.OFTEN) if once else (_Seen.OFTEN, _Seen.ONCE)
        return self._offered[first].first() or self._offered[other].first()

    def _forget(self, shard: Shard, *, evicted: bool) -> None:
        self._sizes[shard.state] -= 1
        if evicted:
            self._ghosts[shard.state].add(shard.key, None)
            self._ghosts[shard.state].trim()
        shard.state = None
