"""Makes findable what a request has computed."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.core.request import Request
from firsttoken.kvcache.block_pool import BlockPool
from firsttoken.kvcache.evictor import Evictor
from firsttoken.kvcache.holding import Holding
from firsttoken.kvcache.prefix_index import BlockHash, PrefixIndex
from firsttoken.kvcache.shard_size import recommend_shard_tokens
from firsttoken.kvcache.shards import TOKEN_BYTES, CachedShard

ShardTokens = Callable[[Request], int]
"""How many tokens the shards that a request makes may have: a multiple of the block."""


def default_shard_tokens(request: Request) -> int:
    """By the prompt's length, which does not change."""
    return recommend_shard_tokens(request.num_prompt)


class Registrar:
    """Puts full blocks into the index, as shards of the size that their request is given.

    Where another request has registered the same tokens before, its shard is joined: the chain of a request is always
    one that it holds, so that nothing in use continues what may be evicted. Registering takes and gives no room.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pool: BlockPool,
        evictor: Evictor,
        block_tokens: int,
        block_hash: BlockHash,
        shard_tokens: ShardTokens,
    ) -> None:
        self._index = index
        self._pool = pool
        self._evictor = evictor
        self._block_tokens = block_tokens
        self._size = block_tokens * TOKEN_BYTES
        self._block_hash = block_hash
        self._shard_tokens = shard_tokens

    def register(self, holding: Holding, data: bytes, request: Request, now: int) -> None:
        """Register the next blocks of a request, whose tokens are ``data``."""
        at, size = 0, self._size
        while at < len(data):
            above = holding.tail or self._index.root(holding.root)
            child = above.children.get(data[at : at + size]) if above is not None else None
            if child is not None:
                count = self._join(holding, child, data, at, request, now)
            else:
                count = self._put(holding, data, at, request, now)
            at += count * size

    # ------------------------------------------------------------------ inside

    def _put(self, holding: Holding, data: bytes, at: int, request: Request, now: int) -> int:
        """Put the next blocks of a request into the index, as far as one shard takes them; their tokens are those of
        ``data`` from byte ``at`` on. Returns how many."""
        tail, first, size = holding.tail, holding.registered, self._size
        count = (len(data) - at) // size
        grows = tail is not None and not tail.told  # it made that one, and nobody else has used it
        if tail is not None and grows and not tail.room:
            self._evictor.settle(tail, now)
            grows = False
        shard_blocks = self._shard_blocks(request)
        count = min(count, tail.room if tail is not None and grows else shard_blocks - first % shard_blocks)
        blocks, data = holding.blocks[first : first + count], data[at : at + count * size]
        hashes = self._hashes(tail.key if tail is not None else holding.root, data)
        if tail is not None and grows:
            self._index.grow(tail, blocks, hashes, data)
        else:
            end = first - first % shard_blocks + shard_blocks
            holding.tail = self._index.add(holding.root, tail, end, blocks, hashes, data)
            self._evictor.made(holding.tail, request, now)
        holding.registered += count
        return count

    def _join(self, holding: Holding, shard: CachedShard, data: bytes, at: int, request: Request, now: int) -> int:
        """Go on with a shard that begins with the next blocks of a request, because another one has computed them too;
        their tokens are those of ``data`` from byte ``at`` on. Returns how many blocks it has of them."""
        count = self._index.common_blocks(shard, data, at, len(data))
        if count < len(shard.blocks):
            shard = self._evictor.split(shard, count, now)
        own = holding.blocks[holding.registered : holding.registered + count]
        if shard.holders:
            self._pool.share(shard.blocks)
            holding.spare += own
        else:
            # Nobody holds the other copy, so one is enough.
            self._pool.forget(shard.blocks)
            shard.blocks = own
        self._evictor.hold(shard, request, now)
        holding.tail = shard
        holding.registered += count
        return count

    def _shard_blocks(self, request: Request) -> int:
        tokens = self._shard_tokens(request)
        if tokens < 1 or tokens % self._block_tokens:
            raise ValueError(
                f"shards have a multiple of {self._block_tokens} tokens, which are a block, but {tokens} were asked for"
            )
        return tokens // self._block_tokens

    def _hashes(self, parent: bytes, data: bytes) -> list[bytes]:
        """The chained hash up to the end of each block of ``data``."""
        size, block_hash = self._size, self._block_hash
        hashes = []
        for begin in range(0, len(data), size):
            parent = block_hash(parent, data[begin : begin + size])
            hashes.append(parent)
        return hashes
