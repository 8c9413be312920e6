"""Why a prompt was not found in the cache beyond some position, and who is told."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.core.cache_miss import Miss, MissReason
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.misses import common_tokens
from tests.support.kv import make_cache, make_request, run_through


def served(cache: KVCache, request: Request) -> Miss | None:
    run_through(cache, request)
    return request.miss


def test_what_nobody_sent_was_never_seen() -> None:
    cache = make_cache(40)
    assert served(cache, make_request(1, list(range(12)))) == Miss(0, MissReason.NEVER_SEEN)
    assert served(cache, make_request(2, list(range(20)))) == Miss(12, MissReason.NEVER_SEEN)
    assert served(cache, make_request(3, [99] * 9)) == Miss(0, MissReason.NEVER_SEEN)
    assert cache.stats().never_seen == 3


@pytest.mark.parametrize("length", [9, 10, 11, 12])
def test_nothing_is_missed_where_no_more_could_be_found(length: int) -> None:
    cache = make_cache(40)
    run_through(cache, make_request(1, list(range(12))))
    assert served(cache, make_request(2, list(range(length)))) is None


def test_who_wants_all_positions_finds_none_and_is_found_by_others() -> None:
    cache = make_cache(40)
    run_through(cache, make_request(1, list(range(12))))
    whole = make_request(2, list(range(20)))
    whole.wants_all_positions = True
    assert served(cache, whole) == Miss(0, MissReason.ALL_POSITIONS)
    assert cache.stats().all_positions == 1
    assert served(cache, make_request(3, list(range(28)))) == Miss(20, MissReason.NEVER_SEEN)
    cache.check()
    whole.tokens.append(1)  # it has output, and comes back after preemption
    assert cache.match(whole)[0] == 20


def test_less_than_a_block_is_no_miss() -> None:
    cache = make_cache(40)
    assert served(cache, make_request(1, [1, 2, 3])) is None
    assert served(cache, make_request(2, [1, 2, 3, 4])) is None, "one token must be computed anyway"


@pytest.mark.parametrize("position", [1, 3, 4, 5, 8, 11, 15])
def test_where_the_cached_continuation_has_other_tokens_is_told_to_the_token(position: int) -> None:
    cache = make_cache(40, shard_tokens=lambda request: 8)
    run_through(cache, make_request(1, list(range(17))))
    prompt = [*range(position), 99, *range(position + 1, 17)]
    assert served(cache, make_request(2, prompt)) == Miss(position, MissReason.DIVERGED)
    assert cache.stats().diverged == 1


def test_of_several_continuations_the_longest_counts() -> None:
    cache = make_cache(40)
    for number, tail in enumerate([[1, 1, 1, 1], [1, 2, 2, 2], [3, 3, 3, 3]]):
        run_through(cache, make_request(number, [0] * 4 + tail))
    assert served(cache, make_request(9, [0] * 4 + [1, 2, 2, 9, 9])) == Miss(7, MissReason.DIVERGED)


def test_what_was_evicted_says_when_and_for_whom(clock: Any) -> None:
    cache = make_cache(8, shard_tokens=lambda request: 8)
    run_through(cache, make_request(1, list(range(24))))
    clock.now += 5 * NS_PER_S
    run_through(cache, make_request(2, [50] * 15, service=ServiceClass.P0))
    clock.now += 3 * NS_PER_S
    assert served(cache, make_request(3, list(range(24)))) == Miss(16, MissReason.EVICTED, 3.0, ServiceClass.P0)
    assert cache.stats().evicted == 1


def test_what_was_evicted_is_known_as_such_to_who_shares_a_part_of_it(clock: Any) -> None:
    cache = make_cache(4)
    run_through(cache, make_request(1, list(range(16))))
    run_through(cache, make_request(2, [50] * 16, service=ServiceClass.P1))
    clock.now += NS_PER_S
    assert served(cache, make_request(3, [*range(8), 70, 71])) == Miss(0, MissReason.EVICTED, 1.0, ServiceClass.P1)


def test_the_last_eviction_counts(clock: Any) -> None:
    cache = make_cache(4)
    for number in range(2):
        run_through(cache, make_request(10 + number, list(range(16))))
        run_through(cache, make_request(20 + number, [50] * 16, service=ServiceClass(number)))
        clock.now += NS_PER_S
    assert served(cache, make_request(3, list(range(16)))) == Miss(0, MissReason.EVICTED, 1.0, ServiceClass.P1)


@pytest.mark.parametrize(("number", "reason"), [(2, MissReason.NEVER_SEEN), (3, MissReason.EVICTED)])
def test_as_many_as_the_pool_has_blocks_are_remembered(number: int, reason: MissReason) -> None:
    cache = make_cache(4)
    for each in range(8):
        run_through(cache, make_request(each, [each] * 16))
    assert len(cache._misses._ghosts) == 4
    miss = served(cache, make_request(100, [number] * 16))
    assert miss is not None
    assert miss.reason is reason


def test_what_is_evicted_again_is_remembered_anew() -> None:
    cache = make_cache(4)
    for each, number in enumerate([1, 2, 3, 4, 1, 5, 6]):  # of the five evicted ones the pool remembers four
        run_through(cache, make_request(each, [number] * 16))
    miss = served(cache, make_request(100, [1] * 16))
    assert miss is not None
    assert miss.reason is MissReason.EVICTED


def test_what_others_send_under_another_salt_is_counted_and_not_told() -> None:
    cache = make_cache(4)
    run_through(cache, make_request(1, list(range(9)), salt="one"))
    assert served(cache, make_request(2, list(range(9)), salt="two")) == Miss(0, MissReason.NEVER_SEEN)
    assert cache.stats().other_salt == 1
    # Not when the other's is lost, nor where it was lost.
    run_through(cache, make_request(3, [50] * 16, salt="one"))
    assert served(cache, make_request(4, list(range(9)), salt="three")) == Miss(0, MissReason.NEVER_SEEN)
    assert served(cache, make_request(5, [50] * 5, salt="four")) == Miss(0, MissReason.NEVER_SEEN)


def test_only_a_chains_first_block_is_looked_for_under_other_salts() -> None:
    cache = make_cache(40)
    run_through(cache, make_request(1, [5] * 9, salt="one"))
    run_through(cache, make_request(2, [1] * 5, salt="two"))
    assert served(cache, make_request(3, [1] * 4 + [5] * 5, salt="two")) == Miss(4, MissReason.NEVER_SEEN)
    assert cache.stats().other_salt == 0


def test_a_preempted_request_keeps_what_it_was_told_first() -> None:
    cache = make_cache(8)
    run_through(cache, make_request(1, list(range(8))))
    request = make_request(2, list(range(16)))
    assert served(cache, request) == Miss(8, MissReason.NEVER_SEEN)
    request.first_scheduled = True
    assert served(cache, request) == Miss(8, MissReason.NEVER_SEEN)
    assert cache.stats().never_seen == 2


def test_without_a_cache_nothing_is_missed() -> None:
    cache = make_cache(8, prefix_caching=False)
    assert served(cache, make_request(1, list(range(16)))) is None


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (b"\1\0\0\0\2\0\0\0", b"\1\0\0\0\2\0\0\0", 2),
        (b"\1\0\0\0\2\0\0\0", b"\1\0\0\0\2\0\0\1", 1),
        (b"\1\0\0\0\2\0\0\0", b"\1\0\0\x80\2\0\0\0", 0),
    ],
)
def test_common_tokens_are_counted_whole(one: bytes, other: bytes, common: int) -> None:
    assert common_tokens(one, other) == common
