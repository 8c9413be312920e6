"""The KV cache as the scheduler sees it: blocks for requests, found again by prefix.

Ownership: a request's holding owns one reference for each of its blocks and for each block of its registered prefix,
from `admit` to `release`; nobody else owns any. The index owns none: what it finds may be evicted as long as no request
holds it. README.md in this folder says what each class owns.

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

from functools import lru_cache

from firsttoken.core.cache_miss import Miss, MissReason
from firsttoken.core.clock import now_ns
from firsttoken.core.identity import Identity
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import Request
from firsttoken.core.retention import NotKept, Retention
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.block_pool import BlockPool
from firsttoken.kvcache.eviction.interface import EvictionPolicy
from firsttoken.kvcache.eviction.lru import LRU
from firsttoken.kvcache.evictor import Evictor, OnEvict
from firsttoken.kvcache.holding import Admission, Holding, Probe
from firsttoken.kvcache.misses import Missed, MissLog
from firsttoken.kvcache.pins import QUOTA, Pins, Wish
from firsttoken.kvcache.prefix_index import BlockHash, Match, PrefixIndex, hash_block
from firsttoken.kvcache.registrar import Registrar, ShardTokens, default_shard_tokens
from firsttoken.kvcache.shards import CachedShard
from firsttoken.kvcache.stats import EvictionCounts, KVStats
from firsttoken.kvcache.tiers.restore import Restored
from firsttoken.kvcache.tiers.tiers import Prompt, Tiers

# Salts whose roots are kept.
_ROOTS = 1024


class KVCache:
    """``num_blocks`` KV blocks of one format and one model (``model``: the checkpoint's fingerprint).

    ``policy`` chooses what is evicted (the least recently used shard, if None), shards are of ``shard_tokens``, and
    ``on_evict`` is told of each before it goes. Requests may have ``keep_quota`` of the blocks kept for a while.
    """

    def __init__(
        self,
        kv_format: KVFormat,
        num_blocks: int,
        *,
        model: str,
        adapter: str = "",
        prefix_caching: bool = True,
        block_hash: BlockHash = hash_block,
        policy: EvictionPolicy | None = None,
        shard_tokens: ShardTokens = default_shard_tokens,
        on_evict: OnEvict | None = None,
        keep_quota: float = QUOTA,
    ) -> None:
        self.kv_format = kv_format
        self.block_tokens = kv_format.block_tokens
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.block_tokens, kv_format.bytes_per_block)
        self._pins = Pins(int(keep_quota * num_blocks))
        self._evictor = Evictor(self.index, policy or LRU(), self._pins)
        self._misses = MissLog(num_blocks)
        identity = Identity(model=model, adapter=adapter, kv_format=kv_format.key)
        # An admission asks several times. Salts are the callers', and so without bound.
        self._root = lru_cache(maxsize=_ROOTS)(identity.salted_root)
        self._block_hash = block_hash
        self._registrar = Registrar(self.index, self.pool, self._evictor, self.block_tokens, block_hash, shard_tokens)
        self._on_evict = on_evict
        self._tiers: Tiers | None = None
        self._borrowed: list[CachedShard] = []
        self._holdings: dict[int, Holding] = {}
        self._evictions = self._evicted_shards = 0
        self._hit_tokens = self._missed_tokens = 0
        self._held_wishes = self._ignored_wishes = 0

    def attach(self, tiers: Tiers) -> None:
        """Have shards spilled to ``tiers`` and restored from there. Before the first request."""
        self._tiers = tiers
        self._evictor.on_idle = tiers.idle
        tiers.attach(self)

    @property
    def tiers(self) -> Tiers | None:
        return self._tiers

    @property
    def pins(self) -> Pins:
        return self._pins

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

    def exclusive_blocks(self, request: Request, but: set[int] | None = None) -> int:
        """How many blocks, other than ``but``, would become available by releasing the request alone. O(its blocks)."""
        holding = self._holdings.get(request.request_id)
        if holding is None:
            return 0
        held = holding.held()
        return self.pool.exclusive([block for block in held if block not in but] if but else held)

    def match(self, request: Request) -> tuple[int, list[int]]:
        """How many of the request's tokens are cached, and in which blocks. Takes no reference.

        Full blocks only, and never all tokens: one must be computed to get logits. None of a request that wants
        something of every position.
        """
        blocks = self.probe(request).blocks
        return len(blocks) * self.block_tokens, blocks

    def probe(self, request: Request) -> Probe:
        """What `admit` would find and take now. O(shards found)."""
        if not self.prefix_caching or request.needs_all_positions:
            return Probe(Match([]), self.blocks_for(request.num_tokens), None)
        tokens = request.tokens
        root, data = self._root(request.salt), tokens.tobytes()
        match = self.index.find(root, data, (len(tokens) - 1) // self.block_tokens)
        found = match.num_blocks
        idle = sum([len(shard.blocks) for shard in match.path if not shard.holders])
        if match.part is not None and not match.part.holders:
            idle += match.part_blocks
        next_hash = None
        if (found + 1) * self.block_tokens <= len(tokens):
            next_hash = self._block_hash(match.end_hash or root, self._tokens_of(request, found, found + 1))
        return Probe(match, self.blocks_for(len(tokens)) - found + idle, next_hash)

    def next_hash(self, request: Request) -> bytes | None:
        """The chained hash of the block that a running request computes next; None when that is not full, or when
        what comes before is not registered."""
        holding = self._holdings.get(request.request_id)
        index = request.num_computed // self.block_tokens
        full = (index + 1) * self.block_tokens <= len(request.tokens)
        if holding is None or not self.prefix_caching or not full or index != holding.registered:
            return None
        parent = holding.tail.key if holding.tail is not None else holding.root
        return self._block_hash(parent, self._tokens_of(request, index, index + 1))

    def admit(self, request: Request, probe: Probe | None = None, *, reserve: int = 0) -> Admission | None:
        """Give a request blocks for all its known tokens, the cached prefix included. ``request.miss`` says why no more
        was found, the first time.

        None, with nothing changed, when fewer than ``reserve`` blocks would remain available. ``probe`` saves the
        look-up when nothing happened since. Raises `ValueError` when the request holds blocks already.
        """
        if request.request_id in self._holdings:
            raise ValueError(f"request {request.request_id} already holds KV blocks; release it first")
        probe = probe or self.probe(request)
        if probe.cost + reserve > self.pool.available:
            return None
        now = now_ns()
        if not request.first_scheduled:
            request.miss = self._miss(request, probe, now)
        match = probe.match
        shards = match.path
        if match.part is not None:
            shards = [*shards, self._evictor.split(match.part, match.part_blocks, now)]
        # Held before anything is taken, or taking could evict them.
        blocks: list[int] = []
        for shard in shards:
            self._evictor.hold(shard, request, now)
            blocks += shard.blocks
        if self._pins.conditional and shards:
            self._evictor.continued(shards[-1], len(blocks), request.num_tokens, now)
        if self._tiers is not None and self._tiers.conditional:
            self._tiers.continued(self._prompt(request), request.num_tokens)
        self.pool.share(blocks)
        found = len(blocks)
        blocks += self._take(self.blocks_for(request.num_tokens) - found, request)
        tail = shards[-1] if shards else None
        self._holdings[request.request_id] = Holding(self._root(request.salt), blocks, found, tail)
        cached_tokens = found * self.block_tokens
        self._hit_tokens += cached_tokens
        self._missed_tokens += request.num_tokens - cached_tokens
        return Admission(list(blocks), cached_tokens)

    def lacks(self, request: Request, num_tokens: int) -> int:
        """How many blocks a request must get before its first ``num_tokens`` tokens fit."""
        return max(0, self.blocks_for(num_tokens) - len(self._holdings[request.request_id].blocks))

    def has_spare(self, request: Request) -> bool:
        """Whether it holds blocks of its own whose tokens are found under another's, which it holds, too."""
        return bool(self._holdings[request.request_id].spare)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the first ``num_tokens`` tokens of an admitted request, evicting if need be.

        The new blocks, in order ([] when it has enough), or None with nothing changed when the pool is short.
        """
        missing = self.lacks(request, num_tokens)
        if missing > self.pool.available:
            return None
        new = self._take(missing, request)
        self._holdings[request.request_id].blocks.extend(new)
        return new

    def commit(self, request: Request) -> None:
        """Register the request's full blocks whose KV is planned and whose tokens are known.

        Call it when no plan is being built. Nothing happens for a request without blocks, nor for one whose prefix was
        forgotten as suspect.
        """
        holding = self._holdings.get(request.request_id)
        if holding is None or not self.prefix_caching:
            return
        full = min(request.num_computed, len(request.tokens)) // self.block_tokens
        if full <= holding.registered or (holding.tail is not None and not holding.tail.live):
            return
        data = self._tokens_of(request, holding.registered, full)
        self._registrar.register(holding, data, request, now_ns())

    def keep(self, request: Request) -> bool | None:
        """Begin the retention that a request wished for, which ends now, before it is released: here, or in a lower
        tier where the quota has no room. False when it was not granted, and ``request.kept_reason`` says why; None when
        there is no such wish."""
        wish = request.retention
        if wish is None or not wish.ttl_ns:
            return None
        request.kept_reason = self._keep(request, wish)
        kept = request.kept_reason is None
        self._held_wishes += kept
        self._ignored_wishes += not kept
        return kept

    def _keep(self, request: Request, retention: Retention) -> NotKept | None:
        holding = self._holdings.get(request.request_id)
        chain = holding.chain() if holding is not None and (holding.tail is None or holding.tail.live) else []
        if not chain:
            return NotKept.TOO_SHORT if self.prefix_caching else NotKept.CACHING_OFF
        now = now_ns()
        wish = Wish(now + retention.ttl_ns, retention.ttl_ns, request.num_prompt if retention.once else None)
        if self._pins.hold(chain, wish, now):
            return None
        if self._tiers is None:
            return NotKept.QUOTA
        if not self._tiers.can_keep(chain, self._prompt(request), self._pins.blocks_passing(now)):
            return NotKept.ALL_QUOTAS
        self._pins.pass_on(chain, wish, now)
        self._tiers.kept_below(chain[0])
        return None

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Give all blocks of a request back; what was registered stays findable until evicted.

        With ``forget`` (its KV is suspect) no block of its prefix can be found afterwards. Nothing happens for a
        request without blocks.
        """
        if self._tiers is not None:
            self._tiers.cancel(request)
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        if forget and self._tiers is not None and self.prefix_caching:
            self._tiers.forget(self._prompt(request))
        # Last block first: what is taken next is then in order again.
        self.pool.drop(reversed(holding.unfindable()), keep=False)
        chain, now = holding.chain(), now_ns()
        if not chain:
            return
        if forget and chain[0].live:
            for shard in self._evictor.forget(chain[-1], now):
                self.pool.forget(shard.blocks)
        if chain[0].live and not chain[0].told:
            self._evictor.settle(chain[0], now)
        if self._pins.timed:
            self._pins.renew(chain, now)
        for shard in chain:
            self.pool.drop(reversed(shard.blocks), keep=shard.live)
            if shard.live:
                self._evictor.let_go(shard, now)

    # ------------------------------------------------------------------ tiers below the device

    def prefetch(self, request: Request) -> None:
        """A request has come and waits: what lies in files begins to be read."""
        if self._tiers is not None and self.prefix_caching and not request.needs_all_positions:
            self._tiers.prefetch(request, self._prompt(request), self.probe(request).match)

    def begin_restore(self, request: Request) -> bool:
        """After `admit`: True when blocks behind those that were found are being restored. Until `poll_restore` says
        that they have arrived, the request must not be computed."""
        if self._tiers is None or not self.prefix_caching or request.needs_all_positions:
            return False
        holding = self._holdings[request.request_id]
        end_hash = holding.tail.key if holding.tail is not None else holding.root
        return self._tiers.begin(request, self._prompt(request), holding.blocks, holding.registered, end_hash)

    def poll_restore(self, request: Request) -> Restored | None:
        """What was restored, once all has arrived: so many tokens behind those that `admit` found count as computed."""
        assert self._tiers is not None, "nothing is restored without tiers"
        restored = self._tiers.poll(request)
        if restored is not None:
            self._hit_tokens += restored.tokens
            self._missed_tokens -= restored.tokens
            if restored.tokens and request.miss is not None and not request.preemptions:
                found = self._holdings[request.request_id].registered + restored.tokens // self.block_tokens
                request.miss = self._miss_behind(request, request.miss, found)
        return restored

    def _miss_behind(self, request: Request, miss: Miss, found: int) -> Miss | None:
        """Why no more was found than ``found`` blocks, of which lower tiers had what the device missed."""
        self._misses.take_back(miss)
        if found >= (len(request.tokens) - 1) // self.block_tokens:
            return None
        holding = self._holdings[request.request_id]
        last = holding.tail.key if holding.tail is not None else holding.root
        for index in range(holding.registered, found + 1):
            last = self._block_hash(last, self._tokens_of(request, index, index + 1))
        tokens = self._tokens_of(request, found, found + 1)
        missed = Missed(Match([]), None, found * self.block_tokens, tokens, last, elsewhere=False)
        return self._misses.explain(missed, now_ns())

    def reclaim(self) -> bool:
        """Have blocks that are borrowed available at once. False where there are none, and nothing has changed: else
        what `probe` found must be looked up again."""
        return bool(self._borrowed) and self._tiers is not None and self._tiers.reclaim()

    def borrow(self, tail: CachedShard) -> None:
        """Keep the blocks of a shard and of all before it, which a tier copies, until `give_back`."""
        for shard in tail.up():
            self._evictor.borrow(shard)
            self.pool.share(shard.blocks)
        self._borrowed.append(tail)

    def give_back(self, tail: CachedShard) -> None:
        self._borrowed.remove(tail)
        now = now_ns()
        for shard in tail.up():
            self.pool.drop(reversed(shard.blocks), keep=shard.live)
            if shard.live:
                self._evictor.let_go(shard, now)

    # ------------------------------------------------------------------ told and checked

    def stats(self) -> KVStats:
        pool, counts = self.pool, self._misses.counts
        return KVStats(
            total=pool.num_blocks,
            used=pool.num_used,
            cached=pool.num_cached,
            free=pool.num_free,
            evictions=self._evictions,
            hit_tokens=self._hit_tokens,
            evicted_shards=self._evicted_shards,
            missed_tokens=self._missed_tokens,
            never_seen=counts[MissReason.NEVER_SEEN],
            evicted=counts[MissReason.EVICTED],
            diverged=counts[MissReason.DIVERGED],
            all_positions=counts[MissReason.ALL_POSITIONS],
            other_salt=self._misses.other_salt,
            kept=self._pins.blocks,
            held_wishes=self._held_wishes,
            ignored_wishes=self._ignored_wishes,
        )

    def evictions(self) -> EvictionCounts:
        misses = self._misses
        return EvictionCounts([list(row) for row in misses.evictions], list(misses.early), misses.kept)

    def check_unused(self) -> None:
        """Raise `AssertionError` unless every block is free or cached and nobody holds one: true whenever there is no
        request. Takes a microsecond, since the next request may come at once."""
        assert not self._holdings, f"requests {sorted(self._holdings)} have ended and hold KV blocks"
        borrowed = {block for tail in self._borrowed for shard in tail.up() for block in shard.blocks}
        used = self.pool.num_used - len(borrowed)
        assert not used, f"{used} KV blocks are in use and nobody holds them"

    def check(self) -> None:
        """Raise `AssertionError` unless free + cached + in use = total, references equal owners, the index is whole,
        and all idle shards can be evicted, leaves first. O(blocks), some 20 ms for a GPU's: for tests."""
        owners: dict[int, int] = {}
        holders: dict[int, int] = {}
        for holding in self._holdings.values():
            held, chain = holding.held(), holding.chain()
            assert len(set(held)) == len(held), "a request holds a block twice"
            for block in held:
                owners[block] = owners.get(block, 0) + 1
            assert sum(len(shard.blocks) for shard in chain) == holding.registered, "a prefix ends inside a shard"
            for shard in chain:
                holders[id(shard)] = holders.get(id(shard), 0) + 1
        for tail in self._borrowed:
            for shard in tail.up():
                holders[id(shard)] = holders.get(id(shard), 0) + 1
                for block in shard.blocks:
                    owners[block] = owners.get(block, 0) + 1
        self.pool.check(owners)
        self.index.check()
        shards = list(self.index.shards())
        idle = 0
        for shard in shards:
            assert shard.holders == holders.get(id(shard), 0), f"{shard} has {holders.get(id(shard), 0)} holders"
            assert shard.offered == (not shard.holders and not shard.children), f"{shard} is offered or not, wrongly"
            assert shard.told or shard.holders == 1, f"the policy does not know {shard}"
            if not shard.holders:
                idle += len(shard.blocks)
                assert all(self.pool.is_cached(block) for block in shard.blocks), f"{shard} is idle and has used blocks"
                held_child = next((child for child in shard.children.values() if child.holders), None)
                assert held_child is None, f"{shard} is idle but {held_child} is not, so it cannot be evicted"
        assert idle == self.pool.num_cached, f"{self.pool.num_cached} blocks are cached, of which {idle} can be found"
        self._pins.check(shards)

    # ------------------------------------------------------------------ inside

    def _prompt(self, request: Request) -> Prompt:
        limit = (len(request.tokens) - 1) // self.block_tokens
        return Prompt(self._root(request.salt), request.tokens.tobytes(), limit)

    def _tokens_of(self, request: Request, first: int, end: int) -> bytes:
        """The tokens of the request's blocks from ``first`` to before ``end``."""
        return request.tokens[first * self.block_tokens : end * self.block_tokens].tobytes()

    def _miss(self, request: Request, probe: Probe, now: int) -> Miss | None:
        """Why no more was found; None when nothing more could be."""
        if request.needs_all_positions and self.prefix_caching:
            return self._misses.count(Miss(0, MissReason.ALL_POSITIONS))
        found = probe.match.num_blocks
        if probe.next_hash is None or found == (len(request.tokens) - 1) // self.block_tokens:
            return None
        tokens = self._tokens_of(request, found, found + 1)
        root = self.index.root(self._root(request.salt))
        elsewhere = not found and self.index.roots_with(tokens) > 0
        missed = Missed(probe.match, root, found * self.block_tokens, tokens, probe.next_hash, elsewhere)
        return self._misses.explain(missed, now)

    def _take(self, count: int, request: Request) -> list[int]:
        while self.pool.num_free < count:
            self._evict(ServiceClass(request.service))
        return self.pool.take(count)

    def _evict(self, by: ServiceClass) -> None:
        now = now_ns()
        shard = self._evictor.victim(now)
        if self._on_evict is not None:
            self._on_evict(shard)
        kept_below = self._tiers is not None and self._tiers.evicting(shard)
        self._misses.evicted(shard, by, now, kept_below=kept_below)
        blocks = shard.blocks
        self._evictor.evict(shard, now)
        self.pool.forget(blocks)
        self._evictions += len(blocks)
        self._evicted_shards += 1
