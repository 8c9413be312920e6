"""Shards of one tier that callers asked to keep for a while, and how much of the tier that may be.

A wish counts from the last use: each use while it lasts begins its time anew (`renew`). One that is over when a request
goes on from there (``beyond``) is ended by `Evictor.continued`, which also tells the policy. A wish that there is no
room for may wait until the tier below has the shard and keeps it instead (`pass_on`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from firsttoken.kvcache.shards import CachedShard

QUOTA = 0.25
_MIN_OUTDATED = 64


class Wish(NamedTuple):
    """Keep it until then, and for ``ttl_ns`` after each use; with ``beyond`` only until a request goes on behind so
    many tokens of its chain, which were a prompt."""

    until_ns: int
    ttl_ns: int
    beyond: int | None = None

    def and_also(self, other: Wish | None) -> Wish:
        """Both: the longer time holds, and who asked without a condition is not made to wait for one."""
        if other is None:
            return self
        beyond = None if self.beyond is None or other.beyond is None else max(self.beyond, other.beyond)
        return Wish(max(self.until_ns, other.until_ns), max(self.ttl_ns, other.ttl_ns), beyond)

    def used(self, now_ns: int) -> Wish:
        return self._replace(until_ns=max(self.until_ns, now_ns + self.ttl_ns))


class Pins:
    """Sets ``keep_until_ns`` of shards as long as those kept have ``most_blocks`` blocks together: somebody must stay
    evictable. Amortised O(log shards)."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.blocks = 0
        self._wishes: dict[CachedShard, Wish] = {}
        self._conditions = 0  # of those, how many wait for a request that goes on
        self._below: dict[CachedShard, Wish] = {}
        # When each was to end; with a number, since shards have no order. Outdated where the shard says otherwise.
        self._ends: list[tuple[int, int, CachedShard]] = []
        self._number = 0

    def room(self, blocks: int, now_ns: int) -> bool:
        """Whether so many more blocks could be kept."""
        self._expire(now_ns)
        return self.blocks + blocks <= self.most_blocks

    def hold(self, chain: Sequence[CachedShard], wish: Wish, now_ns: int) -> bool:
        """Keep all of it. False, with nothing changed, when there is nothing to keep or the quota has no room."""
        self._expire(now_ns)
        more = sum([len(shard.blocks) for shard in chain if shard not in self._wishes])
        if not chain or self.blocks + more > self.most_blocks:
            return False
        for shard in chain:
            if shard not in self._wishes:
                self.blocks += len(shard.blocks)
            self._below.pop(shard, None)
            self._set(shard, wish.and_also(self._wishes.get(shard)))
        return True

    def renew(self, chain: Sequence[CachedShard], now_ns: int) -> None:
        """They were used until now."""
        self._expire(now_ns)
        for shard in chain:
            wish = self._wishes.get(shard)
            if wish is not None and now_ns + wish.ttl_ns > wish.until_ns:
                self._set(shard, wish.used(now_ns))
            elif shard in self._below:
                self._below[shard] = self._below[shard].used(now_ns)

    @property
    def timed(self) -> bool:
        """True while there is something to `renew`."""
        return bool(self._wishes or self._below)

    @property
    def conditional(self) -> bool:
        """True while a shard may wait for a request that goes on."""
        return bool(self._conditions or self._below)

    def wish(self, shard: CachedShard) -> Wish | None:
        """Why it is kept here."""
        return self._wishes.get(shard)

    # ------------------------------------------------------------------ what the tier below is to keep

    def pass_on(self, chain: Sequence[CachedShard], wish: Wish, now_ns: int) -> None:
        """There is no room for a wish here: have those that are not kept anyway kept by the tier below."""
        self._below = {shard: each for shard, each in self._below.items() if each.until_ns > now_ns}
        for shard in chain:
            if shard in self._wishes:
                self._set(shard, wish.and_also(self._wishes[shard]))
            else:
                self._below[shard] = wish.and_also(self._below.get(shard))

    def passing(self, shard: CachedShard, now_ns: int) -> Wish | None:
        """What the tier below is to do for a shard, and has not said yet to have done."""
        wish = self._below.get(shard)
        return wish if wish is not None and wish.until_ns > now_ns else None

    def passed(self, shard: CachedShard) -> None:
        self._below.pop(shard, None)

    def blocks_passing(self, now_ns: int) -> int:
        return sum([len(shard.blocks) for shard, wish in self._below.items() if wish.until_ns > now_ns])

    # ------------------------------------------------------------------ what becomes of shards

    def beyond(self, shard: CachedShard) -> int | None:
        """Behind how many tokens a request must go on for the shard to be kept no more; None for no such wish."""
        wish = self._wishes.get(shard) or self._below.get(shard)
        return wish.beyond if wish is not None else None

    def split(self, shard: CachedShard, front: CachedShard) -> None:
        """``front`` was cut off a shard, and is kept for as long."""
        if shard in self._wishes:
            self._set(front, self._wishes[shard])
        elif shard in self._below:
            self._below[front] = self._below[shard]

    def alike(self, one: CachedShard, other: CachedShard) -> bool:
        """Whether two shards are kept for as long, here and below."""
        return one.keep_until_ns == other.keep_until_ns and self._below.get(one) == self._below.get(other)

    def left(self, shard: CachedShard) -> None:
        """It is gone, or its time is over."""
        self._below.pop(shard, None)
        if shard in self._wishes:
            self.blocks -= len(shard.blocks)
            self._forget(shard)

    def merged(self, front: CachedShard) -> None:
        """Its blocks are another shard's now, which is kept for as long."""
        self._below.pop(front, None)
        if front in self._wishes:
            self._forget(front)

    def check(self, shards: list[CachedShard]) -> None:
        """Raise `AssertionError` unless the blocks of kept shards are counted right, and within the quota."""
        kept = sum(len(shard.blocks) for shard in shards if shard.keep_until_ns)
        assert kept == self.blocks, f"{kept} blocks are kept but {self.blocks} are counted"
        assert kept <= self.most_blocks, f"{kept} blocks are kept, more than {self.most_blocks}"
        wishes = {shard: wish.until_ns for shard, wish in self._wishes.items()}
        assert wishes == {shard: shard.keep_until_ns for shard in shards if shard.keep_until_ns}, "a wish is misplaced"
        conditions = sum(wish.beyond is not None for wish in self._wishes.values())
        assert conditions == self._conditions, "conditions are counted wrong"
        assert all(shard.live for shard in self._below), "a wish outlived its shard"
        assert not self._below.keys() & self._wishes.keys(), "what is kept here is not for the tier below"

    def _forget(self, shard: CachedShard) -> None:
        shard.keep_until_ns = 0
        self._conditions -= self._wishes.pop(shard).beyond is not None

    def _set(self, shard: CachedShard, wish: Wish) -> None:
        old = self._wishes.get(shard)
        self._conditions += (wish.beyond is not None) - (old is not None and old.beyond is not None)
        self._wishes[shard] = wish
        shard.keep_until_ns = wish.until_ns
        self._number += 1
        heappush(self._ends, (wish.until_ns, self._number, shard))
        if len(self._ends) > 2 * len(self._wishes) + _MIN_OUTDATED:
            self._ends = [end for end in self._ends if end[2].keep_until_ns == end[0]]
            heapify(self._ends)

    def _expire(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, _, shard = heappop(self._ends)
            if shard.keep_until_ns == until_ns:
                self.left(shard)
