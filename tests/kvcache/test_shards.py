"""Where shards begin and end, what policies are told of them, and what goes when room is needed."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import CachedShard, KVCache
from firsttoken.kvcache.eviction.lru import LRU
from tests.support.kv import findable, make_cache, make_request, run_through

SHARD = 16  # tokens, of blocks of 4


class Told(LRU):
    """What it was told, and of which tokens: (what, start, end)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def used(self, shard: Any, service: ServiceClass, now_ns: int) -> None:
        self.calls.append(("used", shard.start, shard.start + shard.tokens, service.label))
        super().used(shard, service, now_ns)

    def offer(self, shard: Any, now_ns: int) -> None:
        self.calls.append(("offer", shard.start, shard.start + shard.tokens))
        super().offer(shard, now_ns)

    def withdraw(self, shard: Any) -> None:
        self.calls.append(("withdraw", shard.start, shard.start + shard.tokens))
        super().withdraw(shard)

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def cache_of(blocks: int = 40, **options: Any) -> KVCache:
    return make_cache(blocks, shard_tokens=lambda request: SHARD, **options)


def spans(cache: KVCache) -> list[tuple[int, int]]:
    """(start, end) in tokens of all shards."""
    return sorted((shard.start, shard.start + shard.tokens) for shard in cache.index.shards())


def start(cache: KVCache, request: Request) -> Request:
    """Admit and compute all that it has."""
    assert cache.admit(request) is not None
    request.num_computed = request.num_tokens
    cache.commit(request)
    cache.check()
    return request


def test_shards_end_at_multiples_of_their_size() -> None:
    cache = cache_of()
    run_through(cache, make_request(1, list(range(41))))
    assert spans(cache) == [(0, 16), (16, 32), (32, 40)]


def test_a_shard_grows_with_its_request_and_no_further_than_its_end() -> None:
    cache = cache_of()
    request = start(cache, make_request(1, list(range(6))))
    seen = []
    for token in range(6, 24):
        assert cache.grow(request, token + 1) is not None
        request.tokens.append(token)
        request.num_computed += 1
        cache.commit(request)
        seen.append(spans(cache))
    assert seen[-1] == [(0, 16), (16, 24)]
    assert [(0, 8)] in seen
    assert [(0, 12)] in seen
    cache.check()


def test_each_request_may_have_its_own_size() -> None:
    cache = make_cache(40, shard_tokens=lambda request: 8 if request.service == ServiceClass.P0 else 32)
    run_through(cache, make_request(1, list(range(33)), service=ServiceClass.P0))
    run_through(cache, make_request(2, list(range(100, 133))))
    assert spans(cache) == [(0, 8), (0, 32), (8, 16), (16, 24), (24, 32)]


@pytest.mark.parametrize("tokens", [0, -4, 6])
def test_a_size_that_is_no_multiple_of_the_block_is_refused(tokens: int) -> None:
    cache = make_cache(4, shard_tokens=lambda request: tokens)
    with pytest.raises(ValueError, match=f"a multiple of 4 tokens, which are a block, but {tokens} were asked for"):
        run_through(cache, make_request(1, list(range(9))))


def test_a_match_that_ends_inside_splits_and_the_parts_are_put_together_again() -> None:
    cache = cache_of()
    blocks = run_through(cache, make_request(1, list(range(17))))
    other = make_request(2, [*range(8), 99])
    assert cache.admit(other) is not None
    assert spans(cache) == [(0, 8), (8, 16)]
    cache.check()
    cache.release(other)
    cache.check()
    assert spans(cache) == [(0, 16)]
    assert cache.match(make_request(3, list(range(17)))) == (16, blocks[:4])


def test_a_branch_stays_split_until_one_side_is_gone() -> None:
    cache = cache_of(8)
    run_through(cache, make_request(1, list(range(16))))
    run_through(cache, make_request(2, [*range(8), 70, 71, 72, 73, 74]))
    assert spans(cache) == [(0, 8), (8, 12), (8, 16)]
    assert cache.admit(make_request(3, [1] * 13)) is not None  # four blocks, of which three are free
    cache.check()
    assert spans(cache) == [(0, 12)], "the older branch is gone, and the rest is one shard"


def test_the_last_block_of_a_shard_keeps_its_name_through_splits_and_merges() -> None:
    cache = cache_of()
    run_through(cache, make_request(1, list(range(17))))
    [shard] = cache.index.shards()
    key, hashes = shard.key, list(shard.hashes)
    other = make_request(2, [*range(8), 99])
    assert cache.admit(other) is not None
    assert sorted([each.key, each is shard] for each in cache.index.shards()) == sorted(
        [[hashes[1], False], [key, True]]
    )
    cache.release(other)
    assert [each.key for each in cache.index.shards()] == [key]


def test_parts_of_two_windows_are_not_put_together() -> None:
    cache = cache_of()
    run_through(cache, make_request(1, list(range(13))))
    run_through(cache, make_request(2, list(range(21))))
    assert spans(cache) == [(0, 16), (16, 20)], "12 and 4 tokens became one, 16 and 4 did not"


def test_what_is_used_by_a_better_class_has_its_class() -> None:
    cache = cache_of()
    run_through(cache, make_request(1, list(range(17))))
    run_through(cache, make_request(2, [*range(8), 99], service=ServiceClass.P0))
    run_through(cache, make_request(3, [*range(8), 98]))
    [shard] = cache.index.shards()
    assert (shard.service, shard.uses) == (ServiceClass.P0, 3), "of the part that was used most"


def test_the_policy_is_told_what_was_used_and_what_may_go() -> None:
    policy = Told()
    cache = cache_of(policy=policy)
    first = start(cache, make_request(1, list(range(21)), service=ServiceClass.P1))
    assert policy.take() == [("used", 0, 16, "p1")], "the second may still grow"
    cache.release(first)
    assert policy.take() == [("used", 16, 20, "p1"), ("offer", 16, 20)], "nothing before it may go yet"
    second = make_request(2, [*range(19), 99], service=ServiceClass.P0)
    assert cache.admit(second) is not None
    assert policy.take() == [("used", 0, 16, "p0")]
    cache.release(second)
    assert policy.take() == []
    third = make_request(3, list(range(22)))
    assert cache.admit(third) is not None
    assert policy.take() == [("used", 0, 16, "p2"), ("withdraw", 16, 20), ("used", 16, 20, "p2")]


def test_a_shard_goes_as_a_whole_and_its_last_block_is_taken_last() -> None:
    evicted: list[tuple[int, bytes, bytes, list[int]]] = []

    def on_evict(shard: CachedShard) -> None:
        assert all(cache.pool.is_cached(block) for block in shard.blocks), "its content is still there"
        evicted.append((shard.start, shard.parent_key, shard.key, list(shard.blocks)))

    cache = cache_of(6, on_evict=on_evict)
    blocks = run_through(cache, make_request(1, list(range(24))))
    assert cache.admit(make_request(2, [7])) is not None
    keys = {start: (parent, key) for start, parent, key, _ in evicted}
    assert [(start, each) for start, _, _, each in evicted] == [(16, blocks[4:])]
    [left] = cache.index.shards()
    assert keys[16][0] == left.key
    stats = cache.stats()
    assert (stats.evictions, stats.evicted_shards, stats.cached, stats.free) == (2, 1, 4, 1)
    cache.check()


def test_a_policy_that_names_none_or_another_is_an_error_that_names_it() -> None:
    class Mute(LRU):
        def victim(self, now_ns: int) -> None:
            return None

    cache = cache_of(1, policy=Mute())
    run_through(cache, make_request(1, list(range(4))))
    with pytest.raises(RuntimeError, match="the eviction policy Mute chose None"):
        cache.admit(make_request(2, [1]))


def test_what_two_compute_at_once_is_split_where_the_slower_one_is() -> None:
    cache = cache_of()
    fast, slow = make_request(1, list(range(17))), make_request(2, list(range(17)))
    for request in (fast, slow):
        assert cache.admit(request) is not None
    fast.num_computed = 17
    cache.commit(fast)
    for computed in (5, 9, 14):
        slow.num_computed = computed
        cache.commit(slow)
        cache.check()
    assert spans(cache) == [(0, 4), (4, 8), (8, 12), (12, 16)]
    mine = cache.blocks_of(fast)
    cache.release(slow)
    cache.release(fast)
    cache.check()
    assert spans(cache) == [(0, 16)]
    assert findable(cache) == set(mine[:4])
