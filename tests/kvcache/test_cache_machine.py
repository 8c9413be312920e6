"""Any sequence of admit, compute, append and release, against a model that keeps everything."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from firsttoken.core.cache_miss import MissReason
from firsttoken.core.request import Request
from firsttoken.core.retention import Retention
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import CachedShard
from firsttoken.kvcache.eviction.interface import EvictionPolicy, Shard
from firsttoken.kvcache.eviction.lru import LRU
from firsttoken.kvcache.prefix_index import hash_block
from tests.support.kv import make_cache, make_request

# Few different blocks, so that prefixes meet, split and are computed twice.
PROMPTS = st.builds(
    lambda blocks, end: [token for block in blocks for token in block] + end,
    st.lists(st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 1)]), max_size=6),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)
# The shortest are over before anything else happens.
WISHES = st.builds(Retention, st.sampled_from([1, 10**12]), st.none() | st.sampled_from([0, 1, 2]), st.booleans())


class AnyOffered:
    """A policy that chooses any offered shard, and checks all that it is told."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.known: dict[Shard, bytes] = {}
        self.offered: list[Shard] = []
        self.now = 0

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        self._time(now_ns)
        self.known.setdefault(shard, shard.key)
        assert shard not in self.offered, "one who uses a shard holds it"
        assert shard.uses >= 1
        assert shard.service <= service

    def offer(self, shard: Shard, now_ns: int) -> None:
        self._time(now_ns)
        assert self.known[shard] == shard.key, "a shard that the policy knows got another key"
        assert shard not in self.offered
        self.offered.append(shard)

    def withdraw(self, shard: Shard) -> None:
        self.offered.remove(shard)

    def victim(self, now_ns: int) -> Shard | None:
        self._time(now_ns)
        return self.chance.choice(self.offered) if self.offered else None

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        self._time(now_ns)
        assert self.known.pop(shard) == shard.key
        assert not evicted or shard in self.offered
        if shard in self.offered:
            self.offered.remove(shard)

    def _time(self, now: int) -> None:
        assert now >= self.now, "time goes back"
        self.now = now


class CacheMachine(RuleBasedStateMachine):
    """``content`` is what was computed into each block; ``registered`` all prefixes that ever were, by salt."""

    @initialize(
        blocks=st.integers(2, 20),
        weak=st.booleans(),
        sizes=st.lists(st.sampled_from([4, 8, 12, 32]), min_size=1, max_size=2),
        seed=st.none() | st.integers(0, 1000),
    )
    def start(self, blocks: int, weak: bool, sizes: list[int], seed: int | None) -> None:
        options: dict[str, Any] = {}
        if weak:
            options["block_hash"] = lambda parent, tokens: bytes([(sum(parent) + sum(tokens)) % 4])
        self.weak = weak
        self.policy: EvictionPolicy = LRU() if seed is None else AnyOffered(seed)
        self.gone: list[tuple[str, list[int]]] = []
        self.cache = make_cache(
            blocks,
            policy=self.policy,
            shard_tokens=lambda request: sizes[request.request_id % len(sizes)],
            on_evict=self.evicted,
            keep_quota=0.5,
            **options,
        )
        self.live: list[Request] = []
        self.content: dict[int, list[Any]] = {}
        self.registered: set[tuple[Any, ...]] = set()
        self.complete = True
        self.count = 0
        self.hits = self.asked = 0

    def evicted(self, shard: CachedShard) -> None:
        self.complete = False
        for place, block in enumerate(shard.blocks):
            assert self.cache.pool.is_cached(block), "not free yet, and nobody's"
            _, *tokens = self.content[block]
            assert len(tokens) == shard.start + 4 * (place + 1)
        if not self.weak:
            words = memoryview(shard.data).cast("I").tolist()
            assert tokens[shard.start :] == words
            key = shard.parent_key
            for begin in range(0, len(shard.data), 16):
                key = hash_block(key, shard.data[begin : begin + 16])
            assert key == shard.key

    def longest(self, salt: str, tokens: list[int]) -> int:
        blocks = (len(tokens) - 1) // 4
        while blocks and (salt, *tokens[: 4 * blocks]) not in self.registered:
            blocks -= 1
        return 4 * blocks

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from(["", "s"]),
        service=st.sampled_from(ServiceClass),
        wish=st.none() | WISHES,
    )
    def admit(self, prompt: list[int], salt: str, service: ServiceClass, wish: Retention | None) -> None:
        self.count += 1
        request = make_request(self.count, prompt, salt)
        request.service = service
        request.retention = wish
        cached, found = self.cache.match(request)
        available = self.cache.available
        cost = self.cache.probe(request).cost
        longest, complete = self.longest(salt, prompt), self.complete
        admission = self.cache.admit(request)
        assert (admission is None) == (cost > available)
        if admission is None:
            return
        assert self.cache.available == available - cost
        assert admission.cached_tokens == cached < len(prompt)
        assert admission.blocks[: len(found)] == found
        for index, block in enumerate(found):
            assert self.content[block] == [salt, *prompt[: (index + 1) * 4]], "KV of other tokens"
        assert cached <= longest
        assert cached == longest or not complete, "nothing was evicted, and something is not found"
        self.look_at_miss(request, cached, longest)
        request.num_computed = cached
        self.hits += cached
        self.asked += len(prompt)
        self.live.append(request)

    def look_at_miss(self, request: Request, cached: int, longest: int) -> None:
        miss, rest = request.miss, (request.num_tokens - 1) // 4 * 4
        assert (miss is None) == (cached == rest)
        if miss is None:
            return
        assert cached <= miss.position < cached + 4
        if miss.reason is MissReason.EVICTED:
            assert self.weak or longest > cached
            assert miss.by is not None
            assert miss.age_s >= 0
        else:
            assert miss.position == cached or miss.reason is MissReason.DIVERGED

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 20), register=st.sampled_from([True, True, False]))
    def compute(self, data: st.DataObject, count: int, register: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        blocks = self.cache.blocks_of(request)
        end = min(request.num_computed + count, request.num_tokens)
        findable = {block for shard in self.cache.index.shards() for block in shard.blocks}
        for position in range(request.num_computed, end):
            block = blocks[position // 4]
            assert block not in findable, "a registered block is written"
            self.content[block] = [request.salt, *request.tokens[: position + 1]]
        request.num_computed = end
        if register:
            self.commit(request)

    def commit(self, request: Request) -> None:
        available = self.cache.available
        self.cache.commit(request)
        assert self.cache.available == available, "registering takes and gives nothing"
        for blocks in range(1, min(request.num_computed, request.num_tokens) // 4 + 1):
            self.registered.add((request.salt, *request.tokens[: 4 * blocks]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        request = data.draw(st.sampled_from(self.live))
        for token in tokens:
            if self.cache.grow(request, request.num_tokens + 1) is not None:
                request.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.sampled_from([False, False, False, True]), register=st.booleans())
    def release(self, data: st.DataObject, forget: bool, register: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        if register:
            self.commit(request)
            if not forget:
                assert (self.cache.keep(request) is None) == (request.retention is None)
        gives, available = self.cache.exclusive_blocks(request), self.cache.available
        self.cache.release(request, forget=forget)
        assert self.cache.available == available + gives
        self.complete &= not forget
        self.live.remove(request)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            stats = self.cache.stats()
            assert stats.total == stats.used + stats.cached + stats.free
            assert (stats.hit_tokens, stats.missed_tokens) == (self.hits, self.asked - self.hits)
            if isinstance(self.policy, AnyOffered):
                assert {id(each) for each in self.policy.known} == {
                    id(shard) for shard in self.cache.index.shards() if shard.told
                }

    def teardown(self) -> None:
        for request in getattr(self, "live", []):
            self.cache.release(request)
        if hasattr(self, "cache"):
            self.cache.check()
            self.cache.check_unused()


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
