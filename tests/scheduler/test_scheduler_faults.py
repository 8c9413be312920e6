"""Faults seen in other servers, each by its smallest input at the level of plans."""

from __future__ import annotations

import random
from typing import Any

import pytest

from firsttoken.core.request import Request
from firsttoken.scheduler import PromptOrder


def unlike(number: int, length: int) -> list[int]:
    """A prompt that shares no block with that of another number."""
    return [100 + number] + [7] * (length - 1)


def test_bb26_small_requests_pass_a_big_one_that_does_not_fit(world: Any) -> None:
    w = world(blocks=64, slots=32, alone=256, mixed=64, options={"max_passes": 8})
    holder = w.add(unlike(0, 4 * 40 - 20), 20)
    w.step()
    assert len(w.kv.blocks_of(holder)) >= 35
    big = w.add(unlike(1, 4 * 40 - 1), 2)
    small = [w.add(unlike(2 + i, 3), 2) for i in range(20)]
    for _ in range(4):
        w.step()
    assert all(request.request_id in w.first_token_step for request in small)
    assert big.request_id not in w.first_token_step
    w.drain()


def test_bb26_the_big_one_is_not_starved(world: Any) -> None:
    """A stream of small requests keeps the pool too full for it: after ``max_passes`` steps they wait for it."""
    w = world(blocks=16, slots=8, alone=64, mixed=16, options={"max_passes": 5}, order=PromptOrder(0))
    for i in range(4):
        w.add(unlike(i, 4), 9)
    w.step()
    big = w.add(unlike(50, 48), 2)
    passed_in: list[int] = []
    number = 100
    while big.request_id not in w.first_token_step:
        for _ in range(2):  # more than ends in a step
            w.add(unlike(number, 4), 9)
            number += 1
        planned = w.step()
        started = [w.requests[start.request_id] for start in planned.plan.starts]
        if big not in planned.requests and any(request.preemptions == 0 for request in started):
            passed_in.append(w.steps)
        # Those that run then end (9 tokens each, some after preemption), and it prefills 48 tokens, 16 a step.
        assert w.steps <= (passed_in[-1] if passed_in else 0) + 2 * 9 + 3, "the big request starves"
    assert 1 <= len(passed_in) <= 5, "small requests pass it, in no more steps than stated"
    w.drain()


def test_bb27_a_better_class_takes_the_place_of_worse_ones(world: Any) -> None:
    w = world(blocks=16, slots=8, alone=64, mixed=16)
    low = [w.add(unlike(i, 9), 20, service=2) for i in range(4)]
    for _ in range(5):
        w.step()
    assert w.scheduler.num_running == 4
    urgent = w.add(unlike(9, 30), 4, service=1)
    planned = w.step()
    assert urgent in planned.requests, "it starts in the next step"
    assert w.scheduler.counters.preemptions >= 1
    victims = [request for request in low if request.preemptions]
    assert victims[0] is not low[0], "the newest go first"
    w.drain()  # compares every output with that of the request alone
    assert {w.ended[request.request_id] for request in [urgent, *low]} == {"length"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_bb27_growth_preempts_before_the_plan_is_built(world: Any, depth: int) -> None:
    w = world(blocks=9, slots=4, alone=64, mixed=16, options={"watermark": 0.0})
    requests = [w.add(unlike(i, 6), 16, service=i % 2) for i in range(4)]
    w.drain(depth)
    assert w.scheduler.counters.preemptions >= 1
    assert requests[0].preemptions == 0, "the best and oldest is never a victim"


def test_bb27_nobody_is_preempted_in_vain(world: Any) -> None:
    w = world(blocks=16, slots=2, alone=64, mixed=16)
    w.add(unlike(0, 40), 12, service=0)
    low = w.add(unlike(1, 5), 8, service=2)
    w.step()
    w.step()
    # Even without `low` it would not fit beside the first one.
    w.add(unlike(2, 30), 4, service=1)
    for _ in range(4):
        w.step()
    assert low.preemptions == 0
    w.drain()


def test_bb29_a_long_prompt_holds_nobody_back(world: Any) -> None:
    w = world(blocks=200, slots=4, alone=64, mixed=16, max_model_len=800)
    stream = w.add(unlike(0, 4), 200)
    w.step()
    long = w.add(unlike(1, 640), 2)
    w.step()
    short = w.add(unlike(2, 10), 2)
    while long.request_id not in w.first_token_step:
        before = long.num_computed
        planned = w.step()
        assert stream in planned.requests, "the stream decodes in every step"
        assert planned.plan.num_tokens <= 1 + 1 + 16, "no step is longer than the cap"
        assert long.num_computed > before, "the long prompt progresses in every step"
    assert w.first_token_step[short.request_id] < w.first_token_step[long.request_id]
    assert w.first_token_step[short.request_id] <= 4
    w.drain()


@pytest.mark.parametrize("patience", [0, 2, 5])
def test_bb29_a_long_prompt_lets_no_more_short_ones_pass_than_its_patience_allows(world: Any, patience: int) -> None:
    w = world(blocks=400, slots=4, alone=32, mixed=16, max_model_len=800, order=PromptOrder(patience))
    long = w.add(unlike(0, 320), 2)
    number = 1
    while long.request_id not in w.first_token_step:
        w.add(unlike(number, 15), 3)
        number += 1
        w.step()
        # One short prompt comes, 18 tokens with its output, and 16 tokens are computed in each step.
        assert w.steps <= patience * 320 // 18 + 320 // 16 + 3
    w.drain()


def test_bb35_a_full_cache_is_evicted_and_the_request_starts_at_once(world: Any) -> None:
    w = world(blocks=32, slots=4, alone=256, mixed=64)
    number = 0
    while w.kv.stats().free > 0:
        w.add(unlike(number, 31), 2)
        w.drain()
        number += 1
        stats = w.kv.stats()
        assert stats.free + stats.cached == stats.total
        assert number <= 4
    half = w.add(unlike(99, 64), 2)
    planned = w.step()
    assert half in planned.requests
    w.drain()


@pytest.mark.parametrize("block_tokens", [1, 16])
def test_bb41_no_block_is_lost_on_any_way_out(world: Any, block_tokens: int) -> None:
    """500 mixed requests: stop, length, abort, error, preempted, full prefix hit, chunks of 4, then idle."""
    chance = random.Random(block_tokens)
    w = world(blocks=100 // block_tokens, slots=6, alone=12, mixed=4, block_tokens=block_tokens, max_model_len=120)
    while len(w.requests) < 500 or w.scheduler.num_running or w.scheduler.num_waiting:
        if len(w.requests) < 500 and w.scheduler.num_waiting < 8:
            prompt = chance.choice([[1] * 16, [1] * 32, unlike(chance.randrange(6), 33), unlike(7, 5)])
            prompt = prompt + [2] * chance.randrange(3)
            request = w.add(prompt, chance.randrange(1, 24), stop_ids=chance.choice([(), (0,), (1, 2)]))
            if chance.random() < 0.05:
                w.executor.failing.add(request.request_id)
        if len(w.in_flight) < 2:
            w.plan()
        if w.in_flight and chance.random() < 0.7:
            w.complete()
        if chance.random() < 0.05:
            w.abort(chance.choice(sorted(w.requests)))
    w.drain()
    stats = w.kv.stats()
    assert stats.free + stats.cached == stats.total
    assert {"stop", "length", "abort", "error"} == set(w.ended.values())
    assert w.scheduler.counters.preemptions > 0
    assert w.scheduler.counters.cached_prompt_tokens > 0
    counters = w.scheduler.counters
    assert counters.finished + counters.aborted + counters.failed == 500


@pytest.mark.parametrize("block_hash", [lambda parent, tokens: b"same", lambda parent, tokens: bytes([tokens[0] % 4])])
def test_bb33_a_hash_collision_serves_nobody_elses_kv(world: Any, block_hash: Any) -> None:
    w = world(blocks=64, slots=4, alone=64, cache_options={"block_hash": block_hash})
    for i in range(6):
        request: Request = w.add(unlike(i, 64), 4)
        w.drain()  # the memory model fails on foreign KV; outputs are compared with those alone
        assert request.num_cached == 0
    again = w.add(unlike(0, 64), 4)
    w.drain()
    assert again.num_cached in (0, 4, 8, 12, 16), "only the blocks registered before the first collision"
