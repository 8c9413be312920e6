"""The KV cache as the scheduler sees it: blocks for requests, found again by prefix.

Ownership: a request's holding owns one reference for each of its blocks, from `admit` to `release`; nobody else owns
any. The index owns none: what it finds may be evicted as long as no request holds it.

Time: the cache lives in *plan order*. A step that was planned is as good as done, because the steps of a lane run
in the order of their plans. So a block whose KV is planned may be registered, and a block given back may be handed
to a later step while a step in flight still writes it. Two rules make this exact:

- only full blocks are registered, whose tokens are all known and whose KV is all planned. Later steps of their
  request write later positions only, which lie in later blocks. This holds for a row that goes on after its request
  has ended too: it writes the positions from the last sampled token on, and a block with a position that is not yet
  planned, or whose token was never harvested, is not registered;
- the blocks of a step's rows are registered after the step's plan is complete, so that no row of a step reads what
  another row of the same step computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import msgspec

from firsttoken.core.identity import Identity
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import Request
from firsttoken.kvcache.block_pool import BlockPool
from firsttoken.kvcache.prefix_index import BlockHash, CachedBlock, PrefixIndex, hash_block

_TOKEN_BYTES = 4
# Salts whose roots are kept.
_ROOTS = 1024


class KVStats(msgspec.Struct, frozen=True):
    """Counts of blocks (``total = used + cached + free``), and running totals of evicted blocks and hit tokens."""

    total: int
    used: int
    cached: int
    free: int
    evictions: int
    hit_tokens: int


class Probe(msgspec.Struct, frozen=True):
    """What admission of a request would take, as of now; any change of the cache makes it stale.

    ``cost`` is by how many blocks `KVCache.available` would shrink. ``next_hash`` is the hash of the first full
    block that would have to be computed, None when no full block is missing.
    """

    nodes: list[CachedBlock]
    cost: int
    next_hash: bytes | None

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.nodes]


class Admission(msgspec.Struct, frozen=True):
    """All blocks of an admitted request, in order; the KV of the first ``cached_tokens`` tokens is in them."""

    blocks: list[int]
    cached_tokens: int


class _Holding:
    """The blocks of one request. ``chain[i]`` is the node that stands for its block ``i`` (it may name another
    request's block, when both computed the same tokens). ``collided``: register nothing more."""

    __slots__ = ("blocks", "chain", "collided", "root")

    def __init__(self, root: bytes, blocks: list[int], chain: list[CachedBlock]) -> None:
        self.root = root
        self.blocks = blocks
        self.chain = chain
        self.collided = False


class KVCache:
    """``num_blocks`` KV blocks of one format and one model (``model``: the checkpoint's fingerprint)."""

    def __init__(
        self,
        kv_format: KVFormat,
        num_blocks: int,
        *,
        model: str,
        adapter: str = "",
        prefix_caching: bool = True,
        block_hash: BlockHash = hash_block,
    ) -> None:
        self.kv_format = kv_format
        self.block_tokens = kv_format.block_tokens
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        identity = Identity(model=model, adapter=adapter, kv_format=kv_format.key)
        # An admission asks several times. Salts are the callers', and so without bound.
        self._root = lru_cache(maxsize=_ROOTS)(identity.salted_root)
        self._block_hash = block_hash
        self._holdings: dict[int, _Holding] = {}
        self._evictions = 0
        self._hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def available(self) -> int:
        """Blocks that can be had now, by eviction if need be."""
        return self.pool.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_tokens)

    def blocks_of(self, request: Request) -> list[int]:
        """A copy of the blocks that a request holds, in order; empty when it holds none."""
        holding = self._holdings.get(request.request_id)
        return list(holding.blocks) if holding is not None else []

    def exclusive_blocks(self, request: Request) -> int:
        """How many blocks would become available by releasing the request alone. O(its blocks)."""
        holding = self._holdings.get(request.request_id)
        return sum(self.pool.references(block) == 1 for block in holding.blocks) if holding is not None else 0

    def match(self, request: Request) -> tuple[int, list[int]]:
        """How many of the request's tokens are cached, and in which blocks. Takes no reference.

        Full blocks only, and never all tokens: one must be computed to get logits.
        """
        blocks = self.probe(request).blocks
        return len(blocks) * self.block_tokens, blocks

    def probe(self, request: Request) -> Probe:
        """What `admit` would find and take now. O(cached prefix)."""
        nodes = self._lookup(request)
        new = self.blocks_for(request.num_tokens) - len(nodes)
        idle = sum(self.pool.is_cached(node.block) for node in nodes)
        return Probe(nodes, new + idle, self.hash_of(request, len(nodes)))

    def hash_of(self, request: Request, index: int) -> bytes | None:
        """The chained hash of the request's block ``index``; None when that block is not full, or without caching."""
        if not self.prefix_caching or (index + 1) * self.block_tokens > len(request.tokens):
            return None
        self._extend_hashes(request, index + 1)
        return request.block_hashes[index]

    def admit(self, request: Request, probe: Probe | None = None, *, reserve: int = 0) -> Admission | None:
        """Give a request blocks for all its known tokens, the cached prefix included.

        None, with nothing changed, when fewer than ``reserve`` blocks would remain available. ``probe`` saves the
        look-up when nothing happened since. Raises `ValueError` when the request holds blocks already.
        """
        if request.request_id in self._holdings:
            raise ValueError(f"request {request.request_id} already holds KV blocks; release it first")
        probe = probe or self.probe(request)
        if probe.cost + reserve > self.pool.available:
            return None
        blocks = probe.blocks
        # Referenced before anything is taken, or taking could evict them. Their ancestors are among them.
        for block in blocks:
            self.pool.share(block)
        cached_tokens = len(blocks) * self.block_tokens
        blocks.extend(self._take(self.blocks_for(request.num_tokens) - len(blocks)))
        self._holdings[request.request_id] = _Holding(self._root(request.salt), blocks, list(probe.nodes))
        self._hit_tokens += cached_tokens
        return Admission(list(blocks), cached_tokens)

    def lacks(self, request: Request, num_tokens: int) -> int:
        """How many blocks a request must get before its first ``num_tokens`` tokens fit."""
        return max(0, self.blocks_for(num_tokens) - len(self._holdings[request.request_id].blocks))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the first ``num_tokens`` tokens of an admitted request, evicting if need be.

        The new blocks, in order ([] when it has enough), or None with nothing changed when the pool is short.
        """
        missing = self.lacks(request, num_tokens)
        if missing > self.pool.available:
            return None
        new = self._take(missing)
        self._holdings[request.request_id].blocks.extend(new)
        return new

    def commit(self, request: Request) -> None:
        """Register the request's full blocks whose KV is planned and whose tokens are known.

        Call it when no plan is being built. Nothing happens for a request without blocks.
        """
        holding = self._holdings.get(request.request_id)
        if holding is None or not self.prefix_caching or holding.collided:
            return
        chain = holding.chain
        full = min(request.num_computed, len(request.tokens)) // self.block_tokens
        if full <= len(chain) and (not chain or chain[-1].live):
            return
        while chain and not chain[-1].live:
            chain.pop()  # evicted as another request's block; this request still holds the same content
        self._extend_hashes(request, full)
        insert, root, hashes, blocks = self.index.insert, holding.root, request.block_hashes, holding.blocks
        node = chain[-1] if chain else None
        for index, tokens in enumerate(self._tokens_of(request, len(chain), full), len(chain)):
            node = insert(root, node, hashes[index], tokens, blocks[index])
            if node is None:
                holding.collided = True
                return
            chain.append(node)

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Give all blocks of a request back; what was registered stays findable until evicted.

        With ``forget`` (its KV is suspect) no block of its prefix can be found afterwards. Nothing happens for a
        request without blocks.
        """
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        chain = holding.chain
        if forget and chain and chain[0].live:
            self._forget(chain[0].block)
        drop, registered = self.pool.drop, self.index.blocks
        # Last block first: a block is then always younger than those that continue it, and evicted after them.
        for index in range(len(holding.blocks) - 1, -1, -1):
            block = holding.blocks[index]
            drop(block, keep=block in registered)
            if index < len(chain) and chain[index].block != block and chain[index].live:
                self.pool.touch(chain[index].block)

    def stats(self) -> KVStats:
        pool = self.pool
        return KVStats(
            pool.num_blocks, pool.num_used, pool.num_cached, pool.num_free, self._evictions, self._hit_tokens
        )

    def check_unused(self) -> None:
        """Raise `AssertionError` unless every block is free or cached and nobody holds one: true whenever there is no
        request. Takes a microsecond, since the next request may come at once."""
        assert not self._holdings, f"requests {sorted(self._holdings)} have ended and hold KV blocks"
        assert not self.pool.num_used, f"{self.pool.num_used} KV blocks are in use and nobody holds them"

    def check(self) -> None:
        """Raise `AssertionError` unless free + cached + in use = total, references equal owners and the index is
        whole. O(blocks), some 20 ms for a GPU's: for tests."""
        owners: dict[int, int] = {}
        for holding in self._holdings.values():
            assert len(set(holding.blocks)) == len(holding.blocks), "a request holds a block twice"
            for block in holding.blocks:
                owners[block] = owners.get(block, 0) + 1
        self.pool.check(owners)
        self.index.check()
        for block in range(self.num_blocks):
            assert not self.pool.is_cached(block) or block in self.index, f"cached block {block} cannot be found"

    # ------------------------------------------------------------------ inside

    def _extend_hashes(self, request: Request, count: int) -> None:
        """Bring ``request.block_hashes`` up to its first ``count`` blocks, which must be full and known. Tokens never
        change, so hashes stay."""
        hashes = request.block_hashes
        if len(hashes) >= count:
            return
        parent, block_hash = hashes[-1] if hashes else self._root(request.salt), self._block_hash
        for tokens in self._tokens_of(request, len(hashes), count):
            parent = block_hash(parent, tokens)
            hashes.append(parent)

    def _tokens_of(self, request: Request, first: int, end: int) -> Iterator[bytes]:
        """The tokens of each of the request's blocks from ``first`` to before ``end``."""
        size = self.block_tokens * _TOKEN_BYTES
        tokens = request.tokens[first * self.block_tokens : end * self.block_tokens].tobytes()
        return (tokens[begin : begin + size] for begin in range(0, len(tokens), size))

    def _lookup(self, request: Request) -> list[CachedBlock]:
        """The longest registered chain. Hashes no further than it reaches, so that a miss is cheap."""
        found: list[CachedBlock] = []
        if not self.prefix_caching:
            return found
        root = self._root(request.salt)
        size = self.block_tokens * _TOKEN_BYTES
        node: CachedBlock | None = None
        with memoryview(request.tokens) as words, words.cast("B") as tokens:
            for index in range((len(request.tokens) - 1) // self.block_tokens):
                if index == len(request.block_hashes):
                    self._extend_hashes(request, index + 1)
                block_hash = request.block_hashes[index]
                node = self.index.find(root, node, block_hash, tokens[index * size : (index + 1) * size])
                if node is None:
                    break
                found.append(node)
        return found

    def _take(self, count: int) -> list[int]:
        while self.pool.num_free < count:
            self._evictions += self._forget(self.pool.oldest())
        return self.pool.take(count)

    def _forget(self, block: int) -> int:
        gone = self.index.remove(block)
        for each in gone:
            self.pool.forget(each)
        return len(gone)
