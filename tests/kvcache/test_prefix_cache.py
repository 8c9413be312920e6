"""The cache manager: what is found, what is evicted, and who holds what."""

from __future__ import annotations

import timeit
from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from firsttoken.core.identity import Identity
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.prefix_index import hash_block

FORMAT = KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=4)


def make_cache(blocks: int, **options: Any) -> KVCache:
    return KVCache(FORMAT, blocks, model="m", **options)


def make_request(number: int, prompt: list[int], salt: str = "") -> Request:
    return Request(
        EngineRequest(
            id=number,
            prompt=array("I", prompt).tobytes(),
            params=SamplingParams(),
            seed=0,
            max_tokens=100,
            salt=salt,
        )
    )


def run_through(cache: KVCache, request: Request) -> list[int]:
    """Admit, compute all known tokens, release: the blocks it had."""
    admission = cache.admit(request)
    assert admission is not None
    request.num_computed = request.num_tokens
    cache.commit(request)
    cache.release(request)
    request.num_computed = 0
    return admission.blocks


def test_the_longest_prefix_of_full_blocks_is_found_but_never_all_tokens() -> None:
    cache = make_cache(16)
    blocks = run_through(cache, make_request(1, list(range(10))))
    assert cache.match(make_request(2, list(range(10)))) == (8, blocks[:2])
    assert cache.match(make_request(3, list(range(9)))) == (8, blocks[:2])
    assert cache.match(make_request(4, list(range(8)))) == (4, blocks[:1]), "one token must be computed"
    assert cache.match(make_request(5, [*range(7), 99, 99])) == (4, blocks[:1])
    assert cache.match(make_request(6, [99, *range(9)])) == (0, [])
    assert cache.match(make_request(7, [1])) == (0, [])
    # The same block in another place is another prefix.
    assert cache.match(make_request(8, [*range(4, 8), *range(4, 8), 1])) == (0, [])


def test_the_hash_is_a_chained_sha256_from_the_identity() -> None:
    cache = make_cache(16)
    request = make_request(1, list(range(9)), salt="tenant")
    run_through(cache, request)
    root = Identity(model="m", kv_format=FORMAT.key, salt="tenant").root()
    first = hash_block(root, array("I", range(4)).tobytes())
    assert request.block_hashes == [first, hash_block(first, array("I", range(4, 8)).tobytes())]
    assert len(first) == 32


def test_a_salts_root_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    root = Identity.root
    monkeypatch.setattr(Identity, "root", lambda identity: hashed.append(identity.salt) or root(identity))
    cache = make_cache(16)
    for number, salt in enumerate(["one", "two", "one"]):
        run_through(cache, make_request(number, list(range(9)), salt))
    assert hashed == ["one", "two"]


def test_prefix_caching_can_be_off() -> None:
    cache = make_cache(4, prefix_caching=False)
    run_through(cache, make_request(1, list(range(10))))
    assert cache.match(make_request(2, list(range(10)))) == (0, [])
    assert cache.stats().free == 4


def test_only_blocks_that_are_planned_and_known_are_registered() -> None:
    cache = make_cache(8)
    request = make_request(1, list(range(10)))
    assert cache.admit(request) is not None
    request.num_computed = 7
    cache.commit(request)
    assert len(cache.index) == 1
    request.num_computed = 12  # two steps ahead: position 10 and 11 hold tokens that nobody knows
    request.num_pending = 3
    cache.commit(request)
    assert len(cache.index) == 2
    cache.release(request)
    cache.check()
    assert cache.stats().cached == 2


def test_a_dead_row_writes_no_registered_block() -> None:
    """A request ends with its 8th token while a step in flight computes that token and another one the next.

    The block of the last token is full and known, and its KV is written by a step planned before it is registered;
    what the row writes after that lies in the block behind, which is not registered.
    """
    cache = make_cache(8)
    request = make_request(1, list(range(7)))
    assert cache.admit(request) is not None
    request.num_computed = 7
    cache.commit(request)
    written_later: set[int] = set()
    for position in (7, 8):
        new = cache.grow(request, position + 1)
        assert new is not None
        request.num_computed += 1
        written_later.add(position // 4)
    request.tokens.append(7)
    cache.commit(request)
    blocks = cache.blocks_of(request)
    assert [block in cache.index for block in blocks] == [True, True, False]
    cache.release(request)
    # Nothing planned from here on belongs to the request; both registered blocks were planned in full before.
    assert [block in cache.index for block in blocks] == [True, True, False]
    assert not cache.pool.is_cached(blocks[2])
    assert written_later == {1, 2}


def test_eviction_takes_the_oldest_and_its_end_first() -> None:
    cache = make_cache(6)
    old = run_through(cache, make_request(1, [1] * 12))
    young = run_through(cache, make_request(2, [2] * 12))
    assert cache.stats().free == 0
    order: list[int] = []
    for number in range(3, 9):
        request = make_request(number, [number])
        admission = cache.admit(request)
        assert admission is not None
        order += admission.blocks
        cache.check()
    assert order == [*reversed(old), *reversed(young)]
    assert cache.stats().evictions == 6
    assert cache.admit(make_request(9, [9])) is None


def test_a_hit_is_not_evicted_by_its_own_admission() -> None:
    cache = make_cache(4)
    blocks = run_through(cache, make_request(1, list(range(8))))
    run_through(cache, make_request(2, [50] * 8))
    request = make_request(3, [*range(8), *range(8)])
    admission = cache.admit(request)
    assert admission is not None
    assert admission.blocks[:2] == blocks
    assert admission.cached_tokens == 8
    assert sorted(admission.blocks) == [0, 1, 2, 3]
    cache.check()


def test_idle_hits_cost_what_they_take_from_the_available_blocks() -> None:
    cache = make_cache(4)
    run_through(cache, make_request(1, list(range(8))))
    probe = cache.probe(make_request(2, [*range(8), 1]))
    assert (probe.cost, len(probe.blocks)) == (3, 2)
    assert cache.admit(make_request(2, [*range(8), 1]), reserve=2) is None
    first, second = make_request(3, [*range(8), 1]), make_request(4, [*range(8), 2])
    assert cache.admit(first, reserve=1) is not None
    assert cache.probe(second).cost == 1, "shared with the first"
    assert cache.admit(second) is not None
    assert cache.stats().used == 4
    assert cache.exclusive_blocks(first) == 1
    cache.release(first)
    cache.check()
    cache.release(second)
    cache.check()
    assert cache.available == 4


def test_two_that_compute_the_same_share_the_entry_but_not_the_block() -> None:
    cache = make_cache(8)
    one, two = make_request(1, list(range(9))), make_request(2, [*range(8), 77])
    for request in (one, two):
        assert cache.admit(request) is not None
    for request in (one, two):
        request.num_computed = 9
        cache.commit(request)
    assert len(cache.index) == 2
    mine = cache.blocks_of(one)
    cache.release(two)
    assert cache.match(make_request(3, list(range(9)))) == (8, mine[:2])
    cache.release(one)
    cache.check()
    assert cache.stats().cached == 2


def test_a_parent_is_younger_than_its_child_even_when_another_request_made_it() -> None:
    cache = make_cache(8)
    one, two = make_request(1, list(range(5))), make_request(2, list(range(9)))
    for request in (one, two):
        assert cache.admit(request) is not None
    for request in (one, two):
        request.num_computed = request.num_tokens
        cache.commit(request)
    parent, child = cache.blocks_of(one)[0], cache.blocks_of(two)[1]
    cache.release(one)
    cache.release(two)
    assert cache.pool.is_cached(parent)
    assert cache.pool.oldest() == child


def test_what_continues_an_evicted_block_is_found_again() -> None:
    """`two` continues blocks that `one` registered; those are evicted; then `two`'s own copy is registered."""
    cache = make_cache(7)
    one, two = make_request(1, list(range(5))), make_request(2, list(range(13)))
    for request in (one, two):
        assert cache.admit(request) is not None
    one.num_computed = 5
    cache.commit(one)
    two.num_computed = 13
    cache.commit(two)
    cache.release(one)
    others = [make_request(number, [90 + number]) for number in (3, 4, 5)]
    for other in others:
        assert cache.admit(other) is not None
    assert len(cache.index) == 0, "what continues an evicted block could not be hit"
    cache.check()
    cache.commit(two)
    assert cache.match(make_request(6, list(range(13)))) == (12, cache.blocks_of(two)[:3])
    cache.release(two)
    cache.check()


def test_suspect_kv_is_forgotten_with_all_that_continues_it() -> None:
    cache = make_cache(16)
    run_through(cache, make_request(1, list(range(14))))
    bad = make_request(2, [*range(8), 70, 71])
    assert cache.admit(bad) is not None
    bad.num_computed = 10
    cache.release(bad, forget=True)
    assert cache.match(make_request(3, list(range(14)))) == (0, [])
    assert cache.stats().free == 16
    cache.check()


def test_a_leak_is_found_when_there_is_no_request_and_at_no_cost() -> None:
    cache = make_cache(60_000)
    run_through(cache, make_request(1, list(range(14))))
    # A request may come at once: a walk over all blocks, 20 ms, would be part of its first token.
    assert min(timeit.repeat(cache.check_unused, number=10, repeat=5)) / 10 < 1e-3
    assert cache.admit(make_request(2, list(range(9)))) is not None
    with pytest.raises(AssertionError, match=r"requests \[2\] have ended and hold KV blocks"):
        cache.check_unused()


def test_grow_changes_nothing_when_the_pool_is_short() -> None:
    cache = make_cache(3)
    request = make_request(1, list(range(7)))
    assert cache.admit(request) is not None
    assert cache.grow(request, 8) == []
    assert cache.grow(request, 17) is None
    assert len(cache.blocks_of(request)) == 2
    assert cache.grow(request, 9) == [2]
    with pytest.raises(ValueError, match="already holds"):
        cache.admit(request)
    cache.release(request)
    cache.release(request)
    cache.check()


@pytest.mark.parametrize("block_hash", [lambda parent, tokens: b"", lambda parent, tokens: bytes([parent[0] % 2])])
def test_bb33_equal_hashes_of_different_tokens_are_no_hit(block_hash: Any) -> None:
    cache = make_cache(64, block_hash=block_hash)
    run_through(cache, make_request(1, list(range(64))))
    assert cache.match(make_request(2, list(range(100, 164)))) == (0, [])
    # Equal tokens under another identity, and after another parent.
    assert cache.match(make_request(3, list(range(64)), salt="other"))[0] == 0
    assert cache.match(make_request(4, [*range(4), *range(4), *range(4)]))[0] in (0, 4)
    run_through(cache, make_request(5, list(range(100, 164))))
    cache.check()
    assert cache.match(make_request(6, list(range(100, 164))))[0] == 0


class CacheMachine(RuleBasedStateMachine):
    """Admit, compute, grow, release in any order; a model of which tokens each block was computed for."""

    @initialize(blocks=st.integers(2, 9), weak=st.booleans())
    def start(self, blocks: int, weak: bool) -> None:
        options = {"block_hash": lambda parent, tokens: bytes([(sum(parent) + sum(tokens)) % 4])} if weak else {}
        self.cache = make_cache(blocks, **options)
        self.live: list[Request] = []
        self.content: dict[int, list[int]] = {}
        self.count = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "s"]))
    def admit(self, prompt: list[int], salt: str) -> None:
        self.count += 1
        request = make_request(self.count, prompt, salt)
        cached, found = self.cache.match(request)
        available = self.cache.available
        cost = self.cache.probe(request).cost
        admission = self.cache.admit(request)
        assert (admission is None) == (cost > available)
        if admission is None:
            return
        assert self.cache.available == available - cost
        assert admission.cached_tokens == cached < len(prompt)
        assert admission.blocks[: len(found)] == found
        for index, block in enumerate(found):
            assert self.content[block] == [salt, *prompt[: (index + 1) * 4]], "KV of other tokens"
        request.num_computed = cached
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9), register=st.booleans())
    def compute(self, data: st.DataObject, count: int, register: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        blocks = self.cache.blocks_of(request)
        end = min(request.num_computed + count, request.num_tokens)
        for position in range(request.num_computed, end):
            block = blocks[position // 4]
            node = self.cache.index.node(block)
            assert node is None, "a registered block is written"
            self.content[block] = [request.salt, *request.tokens[: position + 1]]
        request.num_computed = end
        if register:
            self.cache.commit(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if self.cache.grow(request, request.num_tokens + 1) is not None:
            request.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans(), register=st.booleans())
    def release(self, data: st.DataObject, forget: bool, register: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        if register:
            self.cache.commit(request)
        self.cache.release(request, forget=forget)
        self.live.remove(request)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            stats = self.cache.stats()
            assert stats.total == stats.used + stats.cached + stats.free

    def teardown(self) -> None:
        for request in getattr(self, "live", []):
            self.cache.release(request)
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.stats().used == 0


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
