"""Better classes first, under every pressure, and what the worse ones are sure of all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from firsttoken.core.request import Request, Status
from firsttoken.core.service import ClassTargets, Targets


def unlike(number: int, length: int) -> list[int]:
    """A prompt that shares no block with that of another number."""
    return [100 + number] + [7] * (length - 1)


def started(planned: Any) -> list[int]:
    return [] if planned is None else [start.request_id for start in planned.plan.starts]


def tokens_of(planned: Any) -> dict[int, int]:
    return {request.request_id: work.count for work, request in zip(planned.plan.work, planned.requests, strict=True)}


# ------------------------------------------------------------------ preemption


def test_a_better_class_takes_a_slot_at_once_and_the_victims_kv_stays(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=2, alone=64, mixed=32)
    low = [w.add(unlike(i, 9), 20) for i in range(2)]
    for _ in range(3):
        w.step()
    urgent = w.add(unlike(9, 9), 4, service=0)
    assert started(w.step()) == [urgent.request_id], "although it has not waited for max_queue"
    assert [request.preemptions for request in low] == [0, 1], "the newest goes"
    w.drain()
    assert w.kv.stats().hit_tokens >= 8, "the victim found its KV again"


def test_several_of_a_better_class_start_in_one_step(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=4, alone=64, mixed=32)
    low = [w.add(unlike(i, 9), 20) for i in range(4)]
    w.step()
    urgent = [w.add(unlike(9 + i, 9), 4, service=0) for i in range(3)]
    assert started(w.step()) == [request.request_id for request in urgent]
    assert [request.preemptions for request in low] == [0, 1, 1, 1]
    w.drain()


def test_priority_orders_inside_a_class_and_takes_nothing_from_anybody(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=32)
    first = w.add(unlike(0, 9), 8, priority=1000)
    w.step()
    urgent = w.add(unlike(1, 9), 2, priority=-1000)
    w.drain()
    assert first.preemptions == 0
    assert w.first_token_step[urgent.request_id] > w.first_token_step[first.request_id]


@pytest.mark.parametrize("service", [0, 1])
def test_kv_is_taken_after_max_queue_or_at_once_without_it(world: Any, clock: Any, service: int) -> None:
    w = world(blocks=16, slots=8, alone=64, mixed=32)
    for i in range(4):
        w.add(unlike(i, 9), 8)
    w.step()
    urgent = w.add(unlike(9, 30), 4, service=service)
    small = w.add(unlike(10, 3), 2)
    planned = w.step()
    if service == 0:
        assert started(planned) == [], "it waits for its 10 ms, and nobody worse starts meanwhile"
        clock.ms += 9.9
        assert started(w.step()) == []
        clock.ms += 0.1
        planned = w.step()
    assert started(planned)[0] == urgent.request_id
    assert w.scheduler.counters.preemptions > 0
    w.drain()
    assert small.finish_reason is not None


def test_what_comes_free_within_max_queue_costs_nobody_anything(world: Any, clock: Any) -> None:
    w = world(blocks=16, slots=8, alone=64, mixed=32)
    low = [w.add(unlike(i, 9), 4) for i in range(4)]
    w.step()
    urgent = w.add(unlike(9, 30), 4, service=0)
    for _ in range(5):
        clock.ms += 1
        w.step()
    assert urgent.first_scheduled
    assert [request.preemptions for request in low] == [0] * 4
    w.drain()


def test_a_better_class_goes_first_when_decode_rows_lack_blocks_too(world: Any, clock: Any) -> None:
    """The pool is so small that rows are preempted for each other's growth: best class, then oldest, loses nothing."""
    w = world(blocks=9, slots=4, alone=64, mixed=16, options={"watermark": 0.0})
    requests = [w.add(unlike(i, 6), 16, service=[2, 1, 0, 2][i]) for i in range(4)]
    w.drain()
    assert w.scheduler.counters.preemptions > 0
    assert requests[2].preemptions == 0


def test_equal_classes_never_preempt_each_other_to_start(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=2, alone=64, mixed=32)
    running = [w.add(unlike(i, 9), 6, service=0) for i in range(2)]
    w.step()
    w.add(unlike(5, 9), 2, service=0, priority=-9)
    clock.ms += 100
    w.drain()
    assert [request.preemptions for request in running] == [0, 0]


def test_a_better_class_may_start_where_worse_ones_just_went_for_want_of_blocks(world: Any, clock: Any) -> None:
    w = world(blocks=10, slots=4, alone=64, mixed=32, options={"watermark": 0.0})
    low = w.add(unlike(0, 12), 24)
    w.step()
    w.add(unlike(8, 4), 30, service=1)
    for _ in range(30):
        urgent = w.add(unlike(9 + w.steps, 3), 1, service=0)
        clock.ms += 10
        planned = w.step()
        assert urgent.request_id in started(planned)
        if low.preemptions:
            break
    assert low.preemptions == 1
    w.drain()


def test_a_prompt_that_is_being_computed_makes_way_with_its_tokens(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=32, mixed=32)
    low = w.add(unlike(0, 100), 4)
    w.step()
    urgent = w.add(unlike(1, 100), 4, service=0)
    assert tokens_of(w.step()) == {urgent.request_id: 32}
    assert low.preemptions == 1
    w.drain()


# ------------------------------------------------------------------ prefill tokens


def test_the_best_class_has_nine_tenths_of_contended_prefill_and_the_rest_when_alone(world: Any, clock: Any) -> None:
    w = world(blocks=400, slots=4, alone=100, mixed=100, max_model_len=1500)
    low = w.add(unlike(0, 700), 1)
    w.step()
    high = w.add(unlike(1, 180), 1, service=0)
    assert tokens_of(w.step()) == {low.request_id: 10, high.request_id: 90}
    assert tokens_of(w.step()) == {low.request_id: 10, high.request_id: 90}
    assert tokens_of(w.step()) == {low.request_id: 100}
    w.drain()


def test_floors_of_two_classes_follow_their_weights(world: Any, clock: Any) -> None:
    w = world(blocks=400, slots=4, alone=90, mixed=90, max_model_len=1500)
    low = w.add(unlike(0, 400), 1)
    w.step()
    middle = w.add(unlike(1, 400), 1, service=1)
    w.step()
    high = w.add(unlike(2, 400), 1, service=0)
    assert tokens_of(w.step()) == {high.request_id: 81, middle.request_id: 6, low.request_id: 3}
    w.drain()


def test_a_better_class_is_not_held_up_by_worse_prompts_waiting_before_it(world: Any, clock: Any) -> None:
    w = world(blocks=400, slots=8, alone=64, mixed=64, max_model_len=1500)
    for i in range(20):
        w.add(unlike(i, 200), 4)
    for _ in range(3):
        w.step()
    urgent = w.add(unlike(50, 57), 4, service=0)
    w.step()
    assert urgent.request_id in w.first_token_step, "nine tenths of one step are enough"
    w.drain()


# ------------------------------------------------------------------ ageing


def stream(w: Any, clock: Any, until: Callable[[], bool], *, length: int = 9, output: int = 6, each: int = 3) -> int:
    """Send P0 requests, ``each`` a step of 10 ms, which is more than can run; returns the steps that it took."""
    number = 1000 + len(w.requests)
    for step in range(4000):
        if until():
            return step
        for _ in range(each):
            if w.scheduler.num_waiting < 50:
                w.add(unlike(number, length), output, service=0)
                number += 1
        clock.ms += 10
        w.step()
    raise AssertionError("never")


def test_a_worse_class_starts_within_its_bound_whatever_better_ones_send(world: Any, clock: Any) -> None:
    targets = Targets(p2=ClassTargets(starts_within=2000))
    w = world(blocks=60, slots=4, alone=64, mixed=32, targets=targets)
    stream(w, clock, lambda: w.steps > 20)
    low = [w.add(unlike(i, 40), 2) for i in range(3)]
    began = clock.ms
    stream(w, clock, lambda: all(request.num_output for request in low))
    waits = [(request.timeline.times[-1] / 1e6 if request.finish_reason else clock.ms) - began for request in low]
    assert max(waits) <= 2000
    first = min(request.timeline.times[1] / 1e6 for request in low) - began
    assert first >= 1000, "not before half of it"
    w.drain()


def test_without_better_ones_nobody_ages(world: Any, clock: Any) -> None:
    """Inside a class its own order holds: a tenant that has sent a lot does not go before others with time."""
    w = world(blocks=64, slots=1, alone=64, targets=Targets(p2=ClassTargets(starts_within=100)))
    many = [w.add(unlike(i, 9), 3, tenant="a") for i in range(6)]
    w.step()
    clock.ms += 10_000
    w.step()
    other = w.add(unlike(90, 9), 3, tenant="b")
    w.drain()
    order = sorted(w.requests, key=w.first_token_step.__getitem__)
    assert order.index(other.request_id) == 1, "next, as its tenant had nothing yet"
    assert many[0].preemptions == 0


def test_better_ones_keep_most_slots_when_everybody_of_a_worse_class_is_aged(world: Any, clock: Any) -> None:
    targets = Targets(p2=ClassTargets(starts_within=200))
    w = world(blocks=600, slots=16, alone=64, mixed=32, max_model_len=2000, targets=targets)
    low = [w.add(unlike(i, 300), 2) for i in range(40)]
    stream(w, clock, lambda: w.steps > 60, each=2)
    before = [request for request in low if request.first_scheduled]
    clock.ms += 1000
    for _ in range(30):
        stream(w, clock, lambda: True)
        urgent = w.add(unlike(5000 + w.steps, 9), 6, service=0)
        clock.ms += 10
        planned = w.step()
        assert urgent.request_id in started(planned)
        tokenless = [r for r in low if r.status is Status.RUNNING and not r.num_output and r not in before]
        assert len(tokenless) <= 2 + 16
    w.drain()


def test_an_aged_request_is_not_preempted_before_its_first_token(world: Any, clock: Any) -> None:
    targets = Targets(p2=ClassTargets(starts_within=400))
    w = world(blocks=200, slots=4, alone=64, mixed=32, targets=targets)
    stream(w, clock, lambda: w.steps > 10, length=60)
    low = w.add(unlike(0, 100), 20)
    stream(w, clock, lambda: low.status is Status.RUNNING, length=60)
    taken = low.preemptions
    steps = stream(w, clock, lambda: low.num_output > 0, length=60)
    assert low.preemptions == taken
    assert steps > 5, "it had no more than its floor of each step"
    stream(w, clock, lambda: low.preemptions > taken)  # after that its slot is wanted as anybody's
    w.drain()


def test_a_preempted_request_ages_from_its_preemption(world: Any, clock: Any) -> None:
    """It has begun, so no bound of a first start speaks for it; it comes back all the same."""
    targets = Targets(p2=ClassTargets(starts_within=600))
    w = world(blocks=200, slots=2, alone=64, mixed=32, targets=targets)
    low = w.add(unlike(0, 20), 40)
    for _ in range(5):
        w.step()
    stream(w, clock, lambda: low.preemptions == 1)
    for times in (1, 2):
        stream(w, clock, lambda times=times: low.preemptions == times)
        had = low.num_output
        steps = stream(w, clock, lambda had=had: low.num_output > had)
        assert 30 <= steps <= 60
    w.drain()


def test_what_comes_free_is_kept_for_an_aged_request_that_does_not_fit(world: Any, clock: Any) -> None:
    targets = Targets(p2=ClassTargets(starts_within=400))
    w = world(blocks=40, slots=16, alone=64, mixed=32, targets=targets)
    stream(w, clock, lambda: w.steps > 30, length=9, output=6)
    big = w.add(unlike(0, 120), 2)  # 31 of 40 blocks
    began = clock.ms
    stream(w, clock, lambda: big.first_scheduled)
    assert 200 <= clock.ms - began <= 400
    w.drain()


def test_a_better_one_passes_an_aged_one_only_by_what_worse_ones_give(world: Any, clock: Any) -> None:
    targets = Targets(p2=ClassTargets(starts_within=100))
    w = world(blocks=40, slots=8, alone=200, mixed=200, targets=targets, options={"watermark": 0.0})
    holder = w.add(unlike(0, 78), 3, service=0)  # 20 blocks
    worse = w.add(unlike(1, 9), 8)  # 3 blocks, and 4 in the end
    w.step()
    aged = w.add(unlike(2, 80), 2)  # 21 blocks of 17
    clock.ms += 60
    w.step()
    better = w.add(unlike(3, 18), 2, service=0)  # 5 blocks
    clock.ms += 20
    assert started(w.step()) == [], "5 are free, but kept"
    assert worse.preemptions == 0, "and what it has is not enough"
    while not holder.finish_reason:
        w.step()
    assert started(w.step())[0] == aged.request_id
    w.drain()
    assert better.finish_reason is not None


# ------------------------------------------------------------------ hysteresis


def bursts(w: Any, clock: Any, low: Request, *, pause: int, rounds: int) -> None:
    """One P0 request after another, with steps between in which nothing of its class is there."""
    for number in range(rounds):
        if low.finish_reason:
            return
        urgent = w.add(unlike(3000 + number, 9), 3, service=0)
        while not urgent.finish_reason:
            clock.ms += 10
            w.step()
        for _ in range(pause):
            clock.ms += 10
            w.step()


def test_whose_place_was_taken_does_not_come_back_to_be_preempted_again(world: Any, clock: Any) -> None:
    """Both slots' worth of P0 requests come and go all the time: each start would cost the other its place."""
    w = world(blocks=200, slots=2, alone=64, mixed=32)
    low = w.add(unlike(0, 20), 400)
    w.step()
    number = 0
    alive: list[Request] = []
    for _ in range(400):
        clock.ms += 10
        alive = [request for request in alive if not request.finish_reason]
        if len(alive) < 2 and w.steps % 3 == 0:
            alive.append(w.add(unlike(1000 + number, 9), 8, service=0))
            number += 1
        w.step()
    assert number > 60
    # 4 s: 50 ms, doubled each time.
    assert 1 <= low.preemptions <= 7
    w.drain()


def test_a_victim_does_not_come_back_while_a_better_one_waits(world: Any, clock: Any) -> None:
    w = world(blocks=40, slots=2, alone=200, mixed=200, options={"watermark": 0.0})
    low = w.add(unlike(0, 9), 8)
    w.add(unlike(1, 100), 12, service=0)  # 26 blocks
    w.step()
    w.add(unlike(2, 9), 2, service=0)
    for _ in range(3):
        w.step()
    assert low.preemptions == 1
    clock.ms += 10_000
    big = w.add(unlike(3, 80), 2, service=0)  # 20 blocks, which are not free
    while not big.first_scheduled:
        assert low.status is Status.WAITING, "a slot and its blocks are free"
        w.step()
    w.drain()


def test_a_victim_comes_back_at_once_where_nothing_better_is(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=32)
    low = w.add(unlike(0, 20), 60)
    w.step()
    bursts(w, clock, low, pause=4, rounds=6)
    assert low.preemptions == 6, "each burst took its only slot"
    assert low.num_output >= 20, "and it went on between them"
    w.drain()


# ------------------------------------------------------------------ deadlines


def test_what_has_not_started_by_its_deadline_never_does(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=32)
    at = clock.read() + 50_000_000
    running = w.add(unlike(0, 9), 8, deadline_ns=at)
    w.step()
    late, patient = w.add(unlike(1, 9), 2, deadline_ns=at), w.add(unlike(2, 9), 2)
    clock.ms += 49
    w.step()
    assert not w.ended
    clock.ms += 1
    w.step()
    assert w.ended == {late.request_id: "error"}
    assert late.finish_reason == "error"
    assert not late.first_scheduled
    assert w.scheduler.get(late.request_id) is None
    assert w.scheduler.expired() == [], "told once"
    assert w.scheduler.counters.failed == 1
    w.drain()
    assert running.finish_reason == patient.finish_reason == "length"


def test_one_that_started_in_time_may_be_preempted_and_go_on_after_its_deadline(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=32)
    low = w.add(unlike(0, 9), 8, deadline_ns=clock.read() + 10_000_000)
    w.step()
    w.add(unlike(1, 9), 4, service=0)
    w.step()
    assert low.preemptions == 1
    clock.ms += 1000
    w.drain()
    assert low.finish_reason == "length"


def test_a_deadline_that_passed_on_the_way_plans_nothing(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1)
    late = w.add(unlike(0, 9), 8, deadline_ns=clock.read() - 1)
    assert w.step() is None
    assert w.ended == {late.request_id: "error"}
