"""Which shards lie in host memory: a tree of prefixes like the device's, whose blocks are host blocks.

Whatever is in it continues what is in it, up to the root: so a prompt finds the longest prefix by comparing tokens, and
leaves go first here too. What is read or written is *leased*: held with all before it until the lease is released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from firsttoken.kvcache.copy import CopyHandle
from firsttoken.kvcache.eviction.interface import EvictionPolicy
from firsttoken.kvcache.evictor import Evictor
from firsttoken.kvcache.host import HostPool, Run, blocks_of
from firsttoken.kvcache.pins import QUOTA, Pins, Wish
from firsttoken.kvcache.prefix_index import Match, PrefixIndex
from firsttoken.kvcache.shards import CachedShard


class Use(NamedTuple):
    """For whose sake something is done: what policies are told of a request, which may have ended."""

    service: int

    @property
    def kv_class(self) -> int:
        return self.service


class Lease:
    """The shards up to ``tail`` and their blocks stay as long as this is not released, whatever is split meanwhile."""

    __slots__ = ("tail",)

    def __init__(self, tail: CachedShard) -> None:
        self.tail = tail

    def blocks(self, first: int, end: int) -> list[int]:
        """Those of the chain's blocks from ``first`` to before ``end``."""
        found: list[int] = []
        for shard in self.tail.up():
            if shard.next_block <= first:
                break
            found[:0] = shard.blocks[max(first - shard.begin, 0) : max(end - shard.begin, 0)]
        return found


class HostTier:
    """Shards in the blocks of ``pool``, all of which are this tier's but for those that `take` gives out."""

    def __init__(self, pool: HostPool, block_tokens: int, block_bytes: int, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.index = PrefixIndex(block_tokens, block_bytes)
        self._evictor = Evictor(self.index, policy, Pins(int(QUOTA * pool.memory.capacity)))
        self._arriving: dict[int, CopyHandle] = {}  # what is copied to a block
        self.on_kept: Callable[[CachedShard, Wish], None] | None = None  # is told of one that goes although it is kept
        self.orphans = 0  # blocks of forgotten shards that somebody holds yet
        self.evicted_blocks = 0

    def find(self, root: bytes, data: bytes, blocks: int) -> Match:
        """The longest prefix of ``data`` that is here, of ``blocks`` blocks at most; its last part may be arriving."""
        return self.index.find(root, data, blocks)

    def lease(self, match: Match, use: Use, now_ns: int) -> Lease | None:
        """Hold what was found, which counts as a use of it; None when nothing was."""
        shards = match.path
        if match.part is not None:
            shards = [*shards, self._evictor.split(match.part, match.part_blocks, now_ns)]
        for shard in shards:
            self._evictor.hold(shard, use, now_ns)
        return Lease(shards[-1]) if shards else None

    def extend(
        self,
        match: Match,
        root: bytes,
        end: int,
        hashes: list[bytes],
        data: bytes,
        use: Use,
        now_ns: int,
    ) -> Lease | None:
        """A shard of ``data`` right after what was found, with blocks that hold nothing yet; it may not go beyond the
        chain's block ``end``. None when there is no room. Whoever fills the blocks says so by `arriving`, `arrived`."""
        shards = match.path
        if match.part is not None:
            shards = [*shards, self._evictor.split(match.part, match.part_blocks, now_ns)]
        for shard in shards:
            self._evictor.borrow(shard)
        blocks = self.take(len(hashes), now_ns)
        if blocks is None:
            for shard in reversed(shards):
                self._evictor.let_go(shard, now_ns)
            return None
        above = shards[-1] if shards else None
        tail = self.index.add(root, above, end, blocks, hashes, data)
        self._evictor.made(tail, use, now_ns)
        self._evictor.settle(tail, now_ns)
        return Lease(tail)

    def release(self, lease: Lease, now_ns: int) -> None:
        for shard in lease.tail.up():
            if shard.live:
                self._evictor.let_go(shard, now_ns)
                continue
            shard.holders -= 1
            if not shard.holders:
                self.orphans -= len(shard.blocks)
                self.give(shard.blocks)

    def forget(self, root: bytes, first_block: bytes, now_ns: int) -> list[bytes]:
        """Nobody may find what begins with this block (token bytes) any more, as its content is suspect. The chained
        hashes of all that is forgotten; blocks that are being copied come free when that has ended."""
        above = self.index.root(root)
        top = above.children.get(first_block) if above is not None else None
        if top is None:
            return []
        gone = self._evictor.forget(top, now_ns)
        for shard in gone:
            if shard.holders:
                self.orphans += len(shard.blocks)
            else:
                self.give(shard.blocks)
        return [block_hash for shard in gone for block_hash in shard.hashes]

    # ------------------------------------------------------------------ what callers want to be kept

    @property
    def pins(self) -> Pins:
        return self._evictor.pins

    def keep(self, match: Match, first: int, wish: Wish, now_ns: int) -> bool:
        """Keep what was found from the chain's block ``first`` on. False where the quota has no room."""
        shards = match.path
        if match.part is not None:
            shards = [*shards, self._evictor.split(match.part, match.part_blocks, now_ns)]
        return self._evictor.keep([shard for shard in shards if shard.next_block > first], wish, now_ns)

    def used(self, match: Match, now_ns: int) -> None:
        """What was found has been used on the device: what is kept of it here is kept for longer."""
        if self.pins.timed:
            self._evictor.renew(match.path, now_ns)

    def continued(self, match: Match, num_tokens: int, now_ns: int) -> None:
        """A request of ``num_tokens`` tokens begins with what was found, `Evictor.continued`."""
        if match.last is not None:
            self._evictor.continued(match.last, match.num_blocks, num_tokens, now_ns)

    # ------------------------------------------------------------------ copies and blocks

    def arriving(self, blocks: Sequence[int], copy: CopyHandle) -> None:
        for block in blocks:
            self._arriving[block] = copy

    def arrived(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._arriving[block]

    def copies_to(self, blocks: Sequence[int]) -> list[CopyHandle]:
        """What must be done before these blocks hold their KV."""
        if not self._arriving:
            return []
        found = {id(copy): copy for block in blocks if (copy := self._arriving.get(block)) is not None}
        return list(found.values())

    def take(self, count: int, now_ns: int) -> list[int] | None:
        """So many blocks that no shard has, for `give`; None, after evicting what could be, when there are not."""
        while (runs := self.pool.take(count)) is None:
            shard = self._evictor.next_victim(now_ns)
            if shard is None:
                return None
            blocks, wish = shard.blocks, self._evictor.pins.wish(shard)
            if wish is not None and wish.until_ns > now_ns and self.on_kept is not None:
                self.on_kept(shard, wish)
            self._evictor.evict(shard, now_ns)
            self.evicted_blocks += len(blocks)
            self.give(blocks)
        return blocks_of(runs)

    def give(self, blocks: Sequence[int]) -> None:
        self.pool.give(_runs(blocks))

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of blocks, in order, as few pieces."""
        return [self.pool.view(run) for run in _runs(blocks)]

    def check(self) -> None:
        """Raise `AssertionError` unless the index is whole and no block is lost. O(blocks)."""
        self.index.check()
        self.pool.check()
        self.pins.check(list(self.index.shards()))
        known = len(self.index) + self.orphans
        used = self.pool.stats().used
        assert known <= used, f"{known} host blocks are in shards, but only {used} are in use"


def _runs(blocks: Sequence[int]) -> list[Run]:
    """Neighbours together, in order."""
    found: list[Run] = []
    for block in blocks:
        if found and found[-1].first + found[-1].length == block:
            found[-1] = Run(found[-1].first, found[-1].length + 1)
        else:
            found.append(Run(block, 1))
    return found
