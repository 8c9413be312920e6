"""Shards that callers asked to keep for a while, and how much of the pool that may be.

A wish with a time (`hold`) counts from the last use: each use while it lasts begins it anew (`renew`). One that is over
when a request goes on from there (``beyond``) is ended by `Evictor.continued`, which also tells the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from firsttoken.kvcache.shards import CachedShard

QUOTA = 0.25
_MIN_OUTDATED = 64


class Pins:
    """Sets ``keep_until_ns`` of shards as long as those kept have ``most_blocks`` blocks together: somebody must stay
    evictable. Amortised O(log shards)."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.blocks = 0
        self.held_wishes = self.ignored_wishes = 0
        self._ttl_ns: dict[CachedShard, int] = {}
        # Kept until a request goes on behind so many tokens, which were a prompt.
        self._beyond: dict[CachedShard, int] = {}
        # When each was to end; with a number, since shards have no order. Outdated where the shard says otherwise.
        self._ends: list[tuple[int, int, CachedShard]] = []
        self._number = 0
        self._shards = 0

    def hold(self, chain: Sequence[CachedShard], ttl_ns: int, now_ns: int, beyond: int | None = None) -> bool:
        """Keep a whole chain for a time after each use; with ``beyond`` only until a request goes on behind so many of
        its tokens. False, and counted, when there is nothing to keep or the quota has no room for all of it."""
        self._expire(now_ns)
        more = sum([len(shard.blocks) for shard in chain if not shard.keep_until_ns])
        if not chain or self.blocks + more > self.most_blocks:
            self.ignored_wishes += 1
            return False
        self.held_wishes += 1
        for shard in chain:
            # Who asked without a condition is not made to wait for one.
            if beyond is None:
                self._beyond.pop(shard, None)
            elif not shard.keep_until_ns or shard in self._beyond:
                self._beyond[shard] = max(beyond, self._beyond.get(shard, 0))
            if not shard.keep_until_ns:
                self.blocks += len(shard.blocks)
                self._shards += 1
            self._ttl_ns[shard] = max(ttl_ns, self._ttl_ns.get(shard, 0))
            if now_ns + ttl_ns > shard.keep_until_ns:
                self._set(shard, now_ns + ttl_ns)
        return True

    def renew(self, chain: Sequence[CachedShard], now_ns: int) -> None:
        """They were used until now."""
        self._expire(now_ns)
        for shard in chain:
            ttl_ns = self._ttl_ns.get(shard)
            if ttl_ns is not None and now_ns + ttl_ns > shard.keep_until_ns:
                self._set(shard, now_ns + ttl_ns)

    @property
    def timed(self) -> bool:
        """True while there is something to `renew`."""
        return bool(self._ttl_ns)

    @property
    def conditional(self) -> bool:
        """True while a shard waits for a request that goes on."""
        return bool(self._beyond)

    def beyond(self, shard: CachedShard) -> int | None:
        """Behind how many tokens a request must go on for the shard to be kept no more; None for no such wish."""
        return self._beyond.get(shard)

    def split(self, shard: CachedShard, front: CachedShard) -> None:
        """``front`` was cut off a shard, and is kept for as long."""
        if shard.keep_until_ns:
            self._shards += 1
            self._set(front, shard.keep_until_ns)
            for wishes in (self._ttl_ns, self._beyond):
                if shard in wishes:
                    wishes[front] = wishes[shard]

    def left(self, shard: CachedShard) -> None:
        """It is gone, or its time is over."""
        if shard.keep_until_ns:
            self.blocks -= len(shard.blocks)
            self._shards -= 1
            shard.keep_until_ns = 0
            self._forget(shard)

    def merged(self, front: CachedShard) -> None:
        """Its blocks are another shard's now, which is kept for as long."""
        if front.keep_until_ns:
            self._shards -= 1
            front.keep_until_ns = 0
            self._forget(front)

    def check(self, shards: list[CachedShard]) -> None:
        """Raise `AssertionError` unless the blocks of kept shards are counted right, and within the quota."""
        kept = sum(len(shard.blocks) for shard in shards if shard.keep_until_ns)
        assert kept == self.blocks, f"{kept} blocks are kept but {self.blocks} are counted"
        assert sum(shard.keep_until_ns > 0 for shard in shards) == self._shards, "kept shards are counted wrong"
        assert kept <= self.most_blocks, f"{kept} blocks are kept, more than {self.most_blocks}"
        for wishes in (self._ttl_ns, self._beyond):
            assert all(shard.live and shard.keep_until_ns for shard in wishes), "a wish outlived its shard or its time"

    def _forget(self, shard: CachedShard) -> None:
        self._ttl_ns.pop(shard, None)
        self._beyond.pop(shard, None)

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
