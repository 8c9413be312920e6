"""Finding cached KV by the tokens that it was computed from.

A radix tree of shards for each identity (model, adapter, KV format, salt). It is walked by comparing tokens: a hit
hashes nothing, and no collision, made or met, can serve the KV of other tokens. The chained SHA-256 of each block
(`hash_block`), which starts at the identity's root, names content beyond this index: in lower tiers, in the memory of
what was evicted, and between requests that are about to compute the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from firsttoken.kvcache.shards import TOKEN_BYTES, CachedShard

BlockHash = Callable[[bytes, bytes], bytes]
"""``(parent hash, token bytes of the block) -> hash``."""


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """SHA-256 over the parent's 32 bytes and the block's token ids (uint32, little-endian)."""
    digest = hashlib.sha256(parent)
    digest.update(tokens)
    return digest.digest()


class Match(msgspec.Struct, frozen=True):
    """The longest registered prefix: ``path`` from the chain's start on, and the first ``part_blocks`` blocks of
    ``part``, where it ends inside a shard."""

    path: list[CachedShard]
    part: CachedShard | None = None
    part_blocks: int = 0

    @property
    def last(self) -> CachedShard | None:
        """Where it ends."""
        return self.part or (self.path[-1] if self.path else None)

    @property
    def num_blocks(self) -> int:
        return (self.path[-1].next_block if self.path else 0) + self.part_blocks

    @property
    def end_hash(self) -> bytes | None:
        """The chained hash up to its end, None when nothing was found."""
        if self.part is not None:
            return self.part.hashes[self.part_blocks - 1]
        return self.path[-1].key if self.path else None


class PrefixIndex:
    """The tree of what is findable. Owns no references, and decides nothing: its callers do.

    Each operation costs O(blocks of a shard) at most, but for `find`: O(shards found).
    """

    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._size = block_tokens * TOKEN_BYTES
        self._roots: dict[bytes, CachedShard] = {}
        self._firsts: dict[bytes, int] = {}  # first blocks, and under how many roots each is known

    def __len__(self) -> int:
        """Findable blocks. O(shards)."""
        return sum(len(shard.blocks) for shard in self.shards())

    def shards(self) -> Iterator[CachedShard]:
        """All that is findable, each after what it continues. O(shards)."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            shard = stack.pop()
            yield shard
            stack.extend(shard.children.values())

    def root(self, key: bytes) -> CachedShard | None:
        return self._roots.get(key)

    def roots_with(self, first_block: bytes) -> int:
        """How many roots know a chain that begins with these tokens (bytes of one block)."""
        return self._firsts.get(first_block, 0)

    def find(self, root: bytes, data: bytes, blocks: int) -> Match:
        """The longest registered prefix of ``data`` (token bytes), of ``blocks`` blocks at most."""
        path: list[CachedShard] = []
        above = self._roots.get(root)
        at, size = 0, self._size
        limit = blocks * size
        while above is not None and at < limit:
            child = above.children.get(data[at : at + size])
            if child is None:
                break
            held = child.data
            end = at + len(held)
            if end > limit or not data.startswith(held, at):
                return Match(path, child, self.common_blocks(child, data, at, limit))
            path.append(child)
            above, at = child, end
        return Match(path)

    def common_blocks(self, shard: CachedShard, data: bytes, at: int, limit: int) -> int:
        """How many blocks of ``shard`` have the tokens of ``data`` from byte ``at`` to ``limit``."""
        size, held, count = self._size, shard.data, 0
        most = min(len(held), limit - at) // size
        while count < most and data[at + count * size : at + (count + 1) * size] == held[count * size :][:size]:
            count += 1
        return count

    def grow(self, shard: CachedShard, blocks: list[int], hashes: list[bytes], data: bytes) -> None:
        """Put full blocks at the end of a shard that nothing continues and that has room for them."""
        assert not shard.children, "what is continued cannot grow"
        shard.blocks += blocks
        shard.hashes += hashes
        shard.data += data
        self._measure(shard)

    def add(
        self,
        root: bytes,
        above: CachedShard | None,
        end: int,
        blocks: list[int],
        hashes: list[bytes],
        data: bytes,
    ) -> CachedShard:
        """A new shard that continues ``above`` (None: the first of its chain), which must be live and have no child
        that begins alike. It may grow to the chain's block ``end``."""
        if above is None:
            above = self._roots.get(root)
            if above is None:
                above = self._roots[root] = CachedShard(None, root, self._block_tokens, 0, 0)
        shard = CachedShard(above, root, self._block_tokens, above.next_block, end)
        self.grow(shard, blocks, hashes, data)
        first = data[: self._size]
        assert first not in above.children, "two children begin alike"
        above.children[first] = shard
        if above.parent is None:
            self._firsts[first] = self._firsts.get(first, 0) + 1
        return shard

    def split(self, shard: CachedShard, count: int) -> CachedShard:
        """Cut the first ``count`` blocks off: a new shard before it, with the same holders. Who was at the shard's end
        still is."""
        above, cut = shard.parent, count * self._size
        assert above is not None, "a root has no blocks"
        assert 0 < count < len(shard.blocks), f"cannot cut {len(shard.blocks)} blocks at {count}"
        front = CachedShard(above, b"", self._block_tokens, shard.begin, shard.end)
        front.blocks, shard.blocks = shard.blocks[:count], shard.blocks[count:]
        front.hashes, shard.hashes = shard.hashes[:count], shard.hashes[count:]
        front.data, shard.data = shard.data[:cut], shard.data[cut:]
        front.holders = shard.holders
        front.children[shard.data[: self._size]] = shard
        above.children[front.data[: self._size]] = front
        shard.parent = front
        shard.begin += count
        self._measure(front)
        self._measure(shard)
        return front

    def merge(self, shard: CachedShard) -> CachedShard:
        """Put the shard before it in front of it, whose only child it is; returns that one, not live any more."""
        front = shard.parent
        assert front is not None
        assert front.parent is not None, "a root cannot be merged"
        assert len(front.children) == 1, "what else continues it would be lost"
        shard.blocks = front.blocks + shard.blocks
        shard.hashes = front.hashes + shard.hashes
        shard.data = front.data + shard.data
        shard.parent = front.parent
        shard.begin = front.begin
        shard.parent.children[shard.data[: self._size]] = shard
        front.live = False
        front.children = {}
        self._measure(shard)
        return front

    def remove(self, shard: CachedShard) -> list[CachedShard]:
        """Forget a shard and all that continues it, which could never be hit again; returns them, children first."""
        above = shard.parent
        assert above is not None
        first = shard.data[: self._size]
        del above.children[first]
        if above.parent is None:
            self._forget_first(above, first)
        gone = [shard]
        for each in gone:
            gone.extend(each.children.values())
            each.live = False
            each.children = {}
        gone.reverse()
        return gone

    def _forget_first(self, root: CachedShard, first: bytes) -> None:
        left = self._firsts[first] - 1
        if left:
            self._firsts[first] = left
        else:
            del self._firsts[first]
        if not root.children:
            root.live = False
            del self._roots[root.key]

    def _measure(self, shard: CachedShard) -> None:
        count = len(shard.blocks)
        shard.start = shard.begin * self._block_tokens
        shard.tokens = count * self._block_tokens
        shard.nbytes = count * self._block_bytes
        shard.key = shard.hashes[-1]

    def check(self) -> None:
        """Raise `AssertionError` unless every shard is whole and in its place, and no block is in two. O(blocks)."""
        seen: set[int] = set()
        for shard in self.shards():
            above, count = shard.parent, len(shard.blocks)
            assert shard.live, f"{shard} is dead but can be reached"
            assert above is not None
            assert above.live, f"{shard} continues what is dead"
            assert above.children[shard.data[: self._size]] is shard
            assert shard.begin == above.next_block, f"{shard} does not begin where {above} ends"
            assert count, "a shard without blocks"
            assert shard.room >= 0, f"{shard} crosses a multiple of its size"
            assert count == len(shard.hashes) == len(shard.data) // self._size
            assert shard.key == shard.hashes[-1]
            assert (shard.start, shard.tokens) == (shard.begin * self._block_tokens, count * self._block_tokens)
            assert not seen & set(shard.blocks), f"{shard} has a block of another shard"
            seen.update(shard.blocks)
            assert len(set(shard.blocks)) == count, f"{shard} has a block twice"
        firsts: dict[bytes, int] = {}
        for root in self._roots.values():
            assert root.children, "a root without children is kept"
            for first in root.children:
                firsts[first] = firsts.get(first, 0) + 1
        assert firsts == self._firsts, "first blocks are counted wrong"
