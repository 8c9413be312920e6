"""What callers ask to be kept: for a time after its last use, or until they come back with a tool's result."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.core.request import Request
from firsttoken.core.retention import NotKept, Retention
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.eviction import DEFAULT_POLICY, POLICY_NAMES, make_policy
from tests.support.kv import make_cache, make_request

P0, P1, P2 = ServiceClass
TTL = 1000


def asking(number: int, prompt: list[int], wish: Retention | None = None) -> Request:
    request = make_request(number, prompt)
    request.retention = wish
    return request


def begin(cache: KVCache, request: Request) -> Request:
    assert cache.admit(request) is not None
    return request


def end(cache: KVCache, request: Request) -> bool | None:
    """Compute all known tokens, and end it as the scheduler does."""
    request.num_computed = request.num_tokens
    cache.commit(request)
    kept = cache.keep(request)
    cache.release(request)
    cache.check()
    return kept


def say(cache: KVCache, request: Request, tokens: list[int]) -> None:
    assert cache.grow(request, request.num_tokens + len(tokens)) is not None
    request.tokens.extend(tokens)


def through(cache: KVCache, request: Request) -> bool | None:
    return end(cache, begin(cache, request))


def found(cache: KVCache, prompt: list[int]) -> int:
    return cache.match(make_request(999, prompt))[0]


def flood(cache: KVCache, blocks: int) -> None:
    """Twice others take so many blocks and leave again: the second time something must go."""
    for number in (1000, 1001):
        assert through(cache, make_request(number, [number, *[cache.stats().evictions] * (4 * blocks - 1)])) is None


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_prompt_and_answer_are_kept_for_a_time_after_the_end(clock: Any, policy: str) -> None:
    cache = make_cache(16, policy=make_policy(policy))
    request = begin(cache, asking(1, [1] * 9, Retention(TTL)))
    clock.now += 5 * TTL  # it runs longer than that
    say(cache, request, [2] * 4)
    assert end(cache, request) is True
    conversation = [1] * 9 + [2] * 4
    clock.now += TTL - 1
    flood(cache, 13)
    assert found(cache, conversation) == 12
    clock.now += 1
    flood(cache, 13)
    assert found(cache, conversation) == 0, "its time is over"


def test_each_use_begins_the_time_anew(clock: Any) -> None:
    cache = make_cache(16)
    assert through(cache, asking(1, [1] * 9, Retention(TTL)))
    for number in range(2, 6):
        clock.now += TTL - 1
        assert through(cache, asking(number, [1] * 9)) is None
    clock.now += TTL - 1
    flood(cache, 14)
    assert found(cache, [1] * 9) == 8


def test_beyond_the_quota_the_caller_is_told_and_it_is_counted(clock: Any) -> None:
    cache = make_cache(16)  # 4 of them may be kept
    assert through(cache, asking(1, [1] * 13, Retention(TTL))) is True
    assert through(cache, asking(2, [2] * 9, Retention(TTL))) is False
    assert through(cache, asking(3, [1] * 13, Retention(2 * TTL))) is True, "it takes no more room"
    assert through(cache, asking(4, [3] * 3, Retention(TTL))) is False, "less than a block is never cached"
    stats = cache.stats()
    assert (stats.held_wishes, stats.ignored_wishes, stats.kept) == (2, 2, 3)


def test_who_is_not_granted_a_wish_is_told_why(clock: Any) -> None:
    cache = make_cache(16)
    for number, size, reason in ((1, 13, None), (2, 9, NotKept.QUOTA), (3, 3, NotKept.TOO_SHORT)):
        request = asking(number, [number] * size, Retention(TTL))
        assert through(cache, request) is (reason is None)
        assert request.kept_reason is reason
    cold = make_cache(16, prefix_caching=False)
    request = asking(4, [4] * 9, Retention(TTL))
    assert through(cold, request) is False
    assert request.kept_reason is NotKept.CACHING_OFF


def test_what_is_refused_leaves_nothing_behind(clock: Any) -> None:
    cache = make_cache(16)
    assert through(cache, asking(1, [1] * 25, Retention(TTL))) is False, "not in part either"
    assert cache.stats().kept == 0


def test_room_of_a_wish_whose_time_is_over_is_anothers(clock: Any) -> None:
    cache = make_cache(16)
    assert through(cache, asking(1, [1] * 17, Retention(TTL))) is True
    assert through(cache, asking(2, [2] * 17, Retention(TTL))) is False
    clock.now += TTL
    assert through(cache, asking(3, [3] * 17, Retention(TTL))) is True
    assert cache.stats().kept == 4


def test_parts_that_are_kept_and_not_are_not_put_together(clock: Any) -> None:
    cache = make_cache(40)
    through(cache, asking(1, list(range(17))))
    assert through(cache, asking(2, [*range(8), 99], Retention(TTL)))
    assert sorted(len(shard.blocks) for shard in cache.index.shards()) == [2, 2]
    assert cache.stats().kept == 2


def test_what_is_kept_is_kept_through_splits_and_merges(clock: Any) -> None:
    cache = make_cache(40)
    assert through(cache, asking(1, list(range(17)), Retention(TTL)))
    other = begin(cache, asking(2, [*range(8), 99]))
    cache.check()
    assert (cache.stats().kept, len(list(cache.index.shards()))) == (4, 2)
    cache.release(other)
    cache.check()
    assert (cache.stats().kept, len(list(cache.index.shards()))) == (4, 1)
    clock.now += TTL
    through(cache, asking(3, [7] * 5, Retention(TTL)))
    assert cache.stats().kept == 1, "the time of the others is over"


def test_wishes_that_come_again_and_again_take_no_memory(clock: Any) -> None:
    cache = make_cache(40)
    for number in range(500):
        clock.now += 1
        assert through(cache, asking(number, list(range(17)), Retention(10**15)))
    assert len(cache._pins._ends) < 100
    assert cache.stats().kept == 4


# ------------------------------------------------------------------ until a tool's result

ONCE = Retention(TTL, None, True)


def test_it_is_kept_until_the_conversation_goes_on(clock: Any) -> None:
    cache = make_cache(16)
    prompt = [1] * 8
    request = begin(cache, asking(1, prompt, ONCE))
    say(cache, request, [2] * 5)
    assert end(cache, request) is True
    flood(cache, 13)
    assert found(cache, [*prompt, *[2] * 5]) == 12
    goes_on = begin(cache, asking(2, [*prompt, *[2] * 5, 7, 7]))
    assert cache.stats().kept == 0, "its purpose is fulfilled"
    end(cache, goes_on)
    flood(cache, 14)
    assert found(cache, [*prompt, *[2] * 5]) == 0


def test_going_on_with_an_answer_that_is_written_otherwise_ends_it_too(clock: Any) -> None:
    """A template may render an answer in other tokens than those that were generated."""
    cache = make_cache(16)
    request = begin(cache, asking(1, [1] * 8, ONCE))
    say(cache, request, [2] * 5)
    end(cache, request)
    assert cache.stats().kept == 3
    begin(cache, asking(2, [1] * 8 + [3] * 6))
    assert cache.stats().kept == 0
    cache.check()


def test_another_conversation_with_the_same_beginning_ends_nothing(clock: Any) -> None:
    cache = make_cache(40)
    end(cache, begin(cache, asking(1, [1] * 8 + [2] * 8 + [9], ONCE)))
    begin(cache, asking(2, [1] * 8 + [3] * 20))
    cache.check()
    assert cache.stats().kept == 4
    begin(cache, asking(3, [1] * 8 + [2] * 8 + [9]))
    cache.check()
    assert cache.stats().kept == 4, "the same prompt does not go on"


def test_the_time_bounds_it(clock: Any) -> None:
    cache = make_cache(16)
    assert through(cache, asking(1, [1] * 9, ONCE))
    clock.now += TTL
    flood(cache, 14)
    assert found(cache, [1] * 9) == 0


@pytest.mark.parametrize("first", [ONCE, Retention(TTL)])
def test_who_asks_without_condition_gets_the_time(clock: Any, first: Retention) -> None:
    cache = make_cache(16)
    second = Retention(TTL) if first.once else ONCE
    assert through(cache, asking(1, [1] * 9, first))
    assert through(cache, asking(2, [1] * 9, second))
    begin(cache, asking(3, [1] * 12))
    assert cache.stats().kept == 2


def test_all_answers_to_a_prompt_wait_for_the_one_that_goes_on(clock: Any) -> None:
    cache = make_cache(24)
    for number, token in ((1, 2), (2, 3)):
        answer = begin(cache, asking(number, [1] * 9, ONCE))
        say(cache, answer, [token] * 8)
        assert end(cache, answer)
    assert cache.stats().kept == 2 + 2 + 2
    begin(cache, asking(3, [1] * 9 + [2] * 8 + [5]))
    cache.check()
    assert cache.stats().kept == 0, "the answer that was not taken is of no use"
    through(cache, make_request(4, [4] * 48))
    through(cache, make_request(5, [5] * 24))
    assert found(cache, [1] * 9 + [3] * 8) == 8, "nor is it spared"


def test_parts_that_are_put_together_are_kept_as_one(clock: Any) -> None:
    cache = make_cache(40)
    whole = begin(cache, asking(1, [1] * 17, Retention(TTL)))
    whole.num_computed = 17
    cache.commit(whole)
    part = begin(cache, asking(2, [1] * 8 + [2]))
    cache.release(part)
    assert end(cache, whole)
    assert cache.stats().kept == 4
    assert len(list(cache.index.shards())) == 1


# ------------------------------------------------------------------ the class of scoring


@pytest.mark.parametrize(("own", "asked", "outlives"), [(P2, P0, True), (P0, P2, False), (P2, None, False)])
def test_the_class_of_a_hint_is_what_eviction_goes_by(
    clock: Any, own: ServiceClass, asked: ServiceClass | None, outlives: bool
) -> None:
    cache = make_cache(16, policy=make_policy(DEFAULT_POLICY))
    request = asking(1, [1] * 9, Retention(0, asked))
    request.service = own
    assert through(cache, request) is None, "nothing is to be kept for a time"
    for _ in range(3):
        clock.now += 10**9
        flood(cache, 13)
    assert (found(cache, [1] * 9) == 8) == outlives


def test_evictions_are_counted_by_class_and_for_whose_sake(clock: Any) -> None:
    cache = make_cache(8)
    for number, service in ((1, P0), (2, P2)):
        request = asking(number, [number] * 12)
        request.service = service
        through(cache, request)
    urgent = asking(3, [3] * 32)
    urgent.service = P1
    through(cache, urgent)
    counts = cache.evictions()
    assert counts.shards == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert counts.early == [1, 0, 0], "LRU keeps no class"
    assert counts.kept == 0
    clock.now += 16 * 60 * 10**9
    assert through(cache, asking(4, [4] * 8, Retention(TTL)))
    through(cache, asking(5, [5] * 32))
    assert cache.evictions().early == [1, 0, 0], "p1's 8 minutes were over"
    assert cache.evictions().kept == 1, "all blocks can be had"
