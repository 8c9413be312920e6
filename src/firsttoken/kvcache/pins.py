"""Shards that callers asked to keep for a while, and how much of the pool that may be."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from firsttoken.kvcache.shards import CachedShard

QUOTA = 0.25
_MIN_OUTDATED = 64


class Pins:
    """Sets ``keep_until_ns`` of shards as long as those kept have ``most_blocks`` blocks together. Beyond that a
    request to keep one is ignored and counted: somebody must stay evictable. Amortised O(log shards)."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.blocks = 0
        self.ignored = 0
        # When each was to end; with a number, since shards have no order. Outdated where the shard says otherwise.
        self._ends: list[tuple[int, int, CachedShard]] = []
        self._number = 0
        self._shards = 0

    def keep(self, shard: CachedShard, until_ns: int, now_ns: int) -> None:
        """Keep it until then, if that is later than it is kept anyway."""
        self._expire(now_ns)
        if until_ns <= max(shard.keep_until_ns, now_ns):
            return
        if not shard.keep_until_ns:
            if self.blocks + len(shard.blocks) > self.most_blocks:
                self.ignored += 1
                return
            self.blocks += len(shard.blocks)
            self._shards += 1
        self._set(shard, until_ns)

    def split(self, shard: CachedShard, front: CachedShard) -> None:
        """``front`` was cut off a shard, and is kept for as long."""
        if shard.keep_until_ns:
            self._shards += 1
            self._set(front, shard.keep_until_ns)

    def left(self, shard: CachedShard) -> None:
        """It is gone, or its time is over."""
        if shard.keep_until_ns:
            self.blocks -= len(shard.blocks)
            self._shards -= 1
            shard.keep_until_ns = 0

    def merged(self, front: CachedShard) -> None:
        """Its blocks are another shard's now, which is kept for as long."""
        if front.keep_until_ns:
            self._shards -= 1
            front.keep_until_ns = 0

    def check(self, shards: list[CachedShard]) -> None:
        """Raise `AssertionError` unless the blocks of kept shards are counted right, and within the quota."""
        kept = sum(len(shard.blocks) for shard in shards if shard.keep_until_ns)
        assert kept == self.blocks, f"{kept} blocks are kept but {self.blocks} are counted"
        assert sum(shard.keep_until_ns > 0 for shard in shards) == self._shards, "kept shards are counted wrong"
        assert kept <= self.most_blocks, f"{kept} blocks are kept, more than {self.most_blocks}"

    def _set(self, shard: CachedShard, until_ns: int) -> None:
        shard.keep_until_ns = until_ns
        self._number += 1
        heappush(self._ends, (until_ns, self._number, shard))
        if len(self._ends) > 2 * self._shards + _MIN_OUTDATED:
            self._ends = [end for end in self._ends if end[2].keep_until_ns == end[0]]
            heapify(self._ends)

    def _expire(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, _, shard = heappop(self._ends)
            if shard.keep_until_ns == until_ns:
                self.left(shard)
