"""A shard that is findable: its tokens, their hashes, its blocks, and its place among the others."""

from __future__ import annotations

from collections.abc import Iterator

from firsttoken.kvcache.eviction.interface import Shard

TOKEN_BYTES = 4


class CachedShard(Shard):
    """A node of the prefix index: a run of full blocks of one chain, ``data`` their token ids (uint32, little-endian).

    ``hashes[i]`` is the chained hash up to the end of its block ``i``, so the last one is ``key``. ``children`` are
    those that continue it, by the token bytes of their first block. Its first block is the chain's block ``begin``; it
    has no block at or beyond ``end``, the next multiple of its size from the chain's start.

    ``holders`` counts the requests whose registered prefix it is part of: each holds all its blocks. ``told``: the
    policy knows it, so its key must stay. ``offered``: the policy may choose it. Once not ``live`` it is never live
    again, nor is what continues it. The root of an identity has no blocks, and its hash as ``key``.
    """

    __slots__ = (
        "begin",
        "blocks",
        "children",
        "data",
        "end",
        "hashes",
        "holders",
        "live",
        "offered",
        "parent",
        "told",
    )

    def __init__(self, parent: CachedShard | None, key: bytes, block_tokens: int, begin: int, end: int) -> None:
        super().__init__(key, begin * block_tokens, 0, 0)
        self.parent = parent
        self.begin = begin
        self.end = end
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.data = b""
        self.children: dict[bytes, CachedShard] = {}
        self.holders = 0
        self.live = True
        self.told = False
        self.offered = False

    @property
    def parent_key(self) -> bytes:
        """What its own hashes continue: the key of the shard before it, or the root's."""
        assert self.parent is not None, "a root continues nothing"
        return self.parent.key

    @property
    def next_block(self) -> int:
        """The place in the chain of the block behind it."""
        return self.begin + len(self.blocks)

    @property
    def room(self) -> int:
        """How many blocks it could still get."""
        return self.end - self.begin - len(self.blocks)

    def up(self) -> Iterator[CachedShard]:
        """Itself and those before it in its chain, the last first, without the root."""
        shard = self
        while shard.parent is not None:
            above = shard.parent  # read first: the caller may merge what it is given
            yield shard
            shard = above

    def __repr__(self) -> str:
        return f"CachedShard(start={self.start}, tokens={self.tokens}, holders={self.holders}, blocks={self.blocks})"
