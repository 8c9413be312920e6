"""What a request waited for in the queue is told by the plans that did not start it, to the nanosecond."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.core.clock import NS_PER_MS, clock_replaced
from firsttoken.core.request import Request
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.core.waits import WAIT_NAMES
from firsttoken.scheduler.window import StaticWindow
from tests.scheduler.test_window_scheduler import PATIENT, Machine


def unlike(number: int, length: int) -> list[int]:
    """A prompt that shares no block with that of another number."""
    return [100 + number] + [7] * (length - 1)


def waited(request: Request) -> dict[str, float]:
    """In ms, without what it did not wait for."""
    return {name: ns / NS_PER_MS for name, ns in zip(WAIT_NAMES, request.queue_ns, strict=True) if ns}


def run(w: Any, clock: Any, request: Request, ms: float = 10) -> None:
    """Steps of so many ms until the request starts; the plan comes first."""
    for _ in range(100):
        w.step()
        if request.first_scheduled:
            return
        clock.ms += ms
    pytest.fail("it never started")


def test_who_starts_in_the_next_plan_waited_for_the_step_only(world: Any, clock: Any) -> None:
    w = world(blocks=64, alone=64, mixed=64)
    request = w.add(unlike(0, 9))
    clock.ms += 3
    run(w, clock, request)
    assert waited(request) == {"step": 3}


def test_a_slot(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=64)
    w.add(unlike(0, 9), 4)
    w.step()
    request = w.add(unlike(1, 9))
    worse = w.add(unlike(2, 9), 1)
    clock.ms += 1
    run(w, clock, request)
    assert waited(request) == {"step": 1, "slot": 30}
    clock.ms += 10
    run(w, clock, worse)
    assert waited(worse).keys() == {"step", "slot"}
    w.drain()


def test_kv_blocks(world: Any, clock: Any) -> None:
    w = world(blocks=4, slots=3, alone=64, mixed=64, options={"watermark": 0.0})
    w.add(unlike(0, 9), 4)
    w.step()
    request = w.add(unlike(1, 9), 2)
    run(w, clock, request)
    assert waited(request) == {"kv": 30}
    w.drain()


def test_prompt_tokens(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=3, alone=10, mixed=10)
    w.add(unlike(0, 30), 1)
    request = w.add(unlike(1, 30), 1)
    other = w.add(unlike(2, 30), 1)
    run(w, clock, request)
    run(w, clock, other)
    assert waited(request).keys() == {"budget"}
    assert waited(other).keys() == {"budget"}
    w.drain()


def test_a_beginning_that_is_just_computed(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=3, alone=64, mixed=64)
    w.add([5] * 9, 4)
    request = w.add([5] * 9, 4)
    run(w, clock, request)
    assert waited(request) == {"prefix": 10}
    w.drain()


def test_behind_one_that_nobody_may_pass(world: Any, clock: Any) -> None:
    """The large one lacks blocks and is passed no more; the small one, which would fit, waits for its turn."""
    w = world(blocks=8, slots=4, alone=64, mixed=64, options={"max_passes": 0, "watermark": 0.0})
    w.add(unlike(0, 17), 4, service=1)
    w.step()
    large = w.add(unlike(1, 24), 4, service=1)
    small = w.add(unlike(2, 3), 1)
    run(w, clock, small)
    assert waited(large).keys() == {"kv"}
    assert "order" in waited(small)
    assert sum(waited(small).values()) >= sum(waited(large).values())
    w.drain()


def test_a_better_class_that_is_patient_keeps_worse_ones_from_starting(world: Any, clock: Any) -> None:
    targets = Targets(p0=ClassTargets(max_queue=35))
    w = world(blocks=8, slots=4, alone=64, mixed=64, targets=targets, options={"watermark": 0.0})
    w.add(unlike(0, 17), 10)
    w.step()
    urgent = w.add(unlike(1, 20), 1, service=0)
    worse = w.add(unlike(2, 3), 1)
    run(w, clock, urgent)
    assert waited(urgent) == {"kv": 40}
    assert waited(worse) == {} or worse.first_scheduled
    w.drain()
    assert waited(worse)["order"] >= 30


def test_who_was_preempted_queues_again_and_both_waits_are_told(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=64)
    low = w.add(unlike(0, 9), 10)
    clock.ms += 2
    w.step()
    urgent = w.add(unlike(1, 9), 2, service=0)
    clock.ms += 5
    w.step()
    assert low.preemptions == 1
    assert waited(urgent) == {"step": 5}
    clock.ms += 7
    w.step()
    clock.ms += 9
    w.drain()
    spent = waited(low)
    assert spent["step"] == 2 + 7
    assert spent["slot"] == 9


def test_who_leaves_has_waited_to_that_moment(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=64)
    w.add(unlike(0, 9), 4)
    w.step()
    seen, unseen = w.add(unlike(1, 9)), None
    clock.ms += 1
    w.step()
    clock.ms += 4
    unseen = w.add(unlike(2, 9))
    clock.ms += 2
    for request in (seen, unseen):
        w.abort(request.request_id)
    assert waited(seen) == {"step": 1, "slot": 6}
    assert waited(unseen) == {"step": 2}
    w.drain()


def test_the_deadline_of_one_that_waits(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64, mixed=64)
    w.add(unlike(0, 9), 8)
    w.step()
    late = w.add(unlike(1, 9), deadline_ns=clock.read() + 15 * NS_PER_MS)
    for _ in range(3):
        w.step()
        clock.ms += 10
    assert late.finish_reason == "error"
    assert waited(late) == {"slot": 20}
    w.drain()


def test_a_batch_window() -> None:
    machine = Machine(StaticWindow(20), PATIENT)
    with clock_replaced(machine.read):
        number = machine.add()
        request = machine.scheduler.get(number)
        for _ in range(5):
            machine.starts()
            machine.ms += 5
    assert request is not None
    assert waited(request) == {"window": 20}
