"""The cache manager: what is found, what is evicted, and who holds what."""

from __future__ import annotations

import timeit
from array import array
from typing import Any

import pytest

from firsttoken.core.identity import Identity
from firsttoken.kvcache.prefix_index import hash_block
from tests.support.kv import FORMAT, findable, make_cache, make_request, run_through


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
    run_through(cache, make_request(1, list(range(9)), salt="tenant"))
    root = Identity(model="m", kv_format=FORMAT.key, salt="tenant").root()
    first = hash_block(root, array("I", range(4)).tobytes())
    [shard] = cache.index.shards()
    assert shard.hashes == [first, hash_block(first, array("I", range(4, 8)).tobytes())]
    assert (shard.key, shard.parent_key, len(first)) == (shard.hashes[-1], root, 32)


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
    assert findable(cache) == set(blocks[:2])
    cache.release(request)
    # Nothing planned from here on belongs to the request; both registered blocks were planned in full before.
    assert findable(cache) == set(blocks[:2])
    assert not cache.pool.is_cached(blocks[2])
    assert written_later == {1, 2}


def test_eviction_takes_the_oldest_and_its_end_first() -> None:
    cache = make_cache(6, shard_tokens=lambda request: 4)
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


def test_who_continues_what_another_request_made_keeps_it_from_eviction() -> None:
    """`two` computes what `one` registered, and continues it; then `one` goes, and nothing else is free."""
    cache = make_cache(6)
    one, two = make_request(1, list(range(5))), make_request(2, list(range(13)))
    for request in (one, two):
        assert cache.admit(request) is not None
    one.num_computed = 5
    cache.commit(one)
    two.num_computed = 13
    cache.commit(two)
    made = cache.blocks_of(one)[0]
    cache.release(one)
    cache.check()
    assert (cache.available, cache.exclusive_blocks(two)) == (1, 5), "its own copy of the first block, and that one"
    assert cache.exclusive_blocks(two, {made}) == 4
    assert cache.admit(make_request(3, [90])) is not None
    assert cache.match(make_request(4, list(range(13)))) == (12, [made, *cache.blocks_of(two)[1:3]])
    cache.release(two)
    cache.check()
    assert cache.available == 5


def test_of_two_copies_that_nobody_else_holds_one_is_freed() -> None:
    """A prompt that is cached to its last token has its last block computed again."""
    cache = make_cache(8)
    old = run_through(cache, make_request(1, list(range(8))))
    again = make_request(2, list(range(8)))
    assert cache.admit(again) is not None
    again.num_computed = 8
    cache.commit(again)
    cache.check()
    mine = cache.blocks_of(again)
    assert (mine[0], mine[1] == old[1]) == (old[0], False)
    assert findable(cache) == set(mine)
    assert cache.stats().cached == 0
    assert cache.grow(again, 12) is not None
    again.tokens.extend(range(8, 12))
    again.num_computed = 12
    cache.commit(again)
    cache.release(again)
    cache.check()
    assert cache.match(make_request(3, list(range(13))))[0] == 12
    assert cache.stats().cached == 3


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


def test_what_shares_suspect_kv_does_not_make_it_findable_again() -> None:
    cache = make_cache(16)
    run_through(cache, make_request(1, list(range(9))))
    bad, other = make_request(2, list(range(9))), make_request(3, list(range(14)))
    for request in (bad, other):
        assert cache.admit(request) is not None
    other.num_computed = 14
    cache.release(bad, forget=True)
    cache.commit(other)
    cache.check()
    assert cache.match(make_request(4, list(range(14)))) == (0, [])
    cache.release(other)
    cache.check()
    assert cache.stats().free == 16


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
    """Whatever a hash says, tokens are compared, and only within an identity."""
    cache = make_cache(64, block_hash=block_hash)
    run_through(cache, make_request(1, list(range(64))))
    assert cache.match(make_request(2, list(range(100, 164)))) == (0, [])
    # Equal tokens under another identity, and after another parent.
    assert cache.match(make_request(3, list(range(64)), salt="other"))[0] == 0
    assert cache.match(make_request(4, [*range(4), *range(4), *range(4)]))[0] == 4
    blocks = run_through(cache, make_request(5, list(range(100, 164))))
    cache.check()
    assert cache.match(make_request(6, list(range(100, 164)))) == (60, blocks[:15])
