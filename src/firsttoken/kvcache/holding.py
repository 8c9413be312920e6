"""What a request would get, gets and has in the KV cache."""

from __future__ import annotations

import msgspec

from firsttoken.kvcache.prefix_index import Match
from firsttoken.kvcache.shards import CachedShard


class Probe(msgspec.Struct, frozen=True):
    """What admission of a request would take, as of now; any change of the cache makes it stale.

    ``cost`` is by how many blocks `KVCache.available` would shrink. ``next_hash`` is the hash of the first full
    block that would have to be computed, None when no full block is missing.
    """

    match: Match
    cost: int
    next_hash: bytes | None

    @property
    def blocks(self) -> list[int]:
        """Those that were found, in order."""
        match = self.match
        blocks = [block for shard in match.path for block in shard.blocks]
        return blocks + match.part.blocks[: match.part_blocks] if match.part is not None else blocks


class Admission(msgspec.Struct, frozen=True):
    """All blocks of an admitted request, in order; the KV of the first ``cached_tokens`` tokens is in them."""

    blocks: list[int]
    cached_tokens: int


class Holding:
    """The blocks of one request. The first ``registered`` of them have their tokens in the index, in the chain that
    ends with ``tail`` (None: none has). Where that chain names another request's block, which computed the same tokens,
    both are held, and the own one is in ``spare``."""

    __slots__ = ("blocks", "registered", "root", "spare", "tail")

    def __init__(self, root: bytes, blocks: list[int], registered: int, tail: CachedShard | None) -> None:
        self.root = root
        self.blocks = blocks
        self.registered = registered
        self.tail = tail
        self.spare: list[int] = []

    def chain(self) -> list[CachedShard]:
        """The shards of its registered prefix, the last first."""
        return list(self.tail.up()) if self.tail is not None else []

    def unfindable(self) -> list[int]:
        """The blocks that it alone knows."""
        return self.spare + self.blocks[self.registered :]

    def held(self) -> list[int]:
        """All blocks that it has a reference to."""
        if not self.spare:
            return self.blocks
        return [block for shard in self.chain() for block in shard.blocks] + self.unfindable()
