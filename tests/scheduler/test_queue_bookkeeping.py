"""Callers who leave by the thousands, and what the queue keeps of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from benchmarks.soak import held

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Scheduler, SchedulerConfig, TokenCap
from firsttoken.simulate.run import KV_FORMAT

PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def full_scheduler(clock: Any) -> Scheduler:
    """One request has the only row."""
    kv = KVCache(KV_FORMAT, 1000, model="m")
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, max_model_len=1000), kv, TokenCap(512, 16))
    add(scheduler, clock, 0)
    scheduler.plan()
    return scheduler


def add(scheduler: Scheduler, clock: Any, number: int, deadline_ms: float = 0.0) -> None:
    wire = EngineRequest(
        id=number,
        prompt=number.to_bytes(4, "little") * 8,
        params=PARAMS,
        seed=0,
        max_tokens=100,
        service=ServiceClass.P2 if number % 2 else ServiceClass.P1,
        tenant=f"tenant {number % 100}",
        deadline_ns=clock.read() + round(deadline_ms * NS_PER_MS) if deadline_ms else 0,
    )
    scheduler.add(Request(wire))


@pytest.mark.parametrize("deadline_ms", [0.0, 86_400_000.0])
def test_nothing_is_kept_of_those_who_left(clock: Any, deadline_ms: float) -> None:
    scheduler = full_scheduler(clock)
    before = held(scheduler)
    for number in range(1, 3001):
        add(scheduler, clock, number, deadline_ms)
    for number in range(1, 3001):
        scheduler.abort(number)
    assert scheduler.num_waiting == 0
    after = held(scheduler)
    assert after["Request objects"] == before["Request objects"] == 1
    assert after["Ticket objects"] == 1
    assert sum(after.values()) <= sum(before.values())


def test_while_some_wait_little_is_kept_of_those_who_left(clock: Any) -> None:
    scheduler = full_scheduler(clock)
    for number in range(1, 2001):
        add(scheduler, clock, number, 86_400_000.0)
    for number in range(1, 1991):
        scheduler.abort(number)
    assert held(scheduler)["Request objects"] < 100


def test_leaving_is_cheap_whatever_waits(clock: Any) -> None:
    scheduler = full_scheduler(clock)
    for number in range(1, 20_001):
        add(scheduler, clock, number, 86_400_000.0)
    began = time.process_time()
    for number in range(1, 20_001, 2):
        scheduler.abort(number)
    for number in range(2, 20_001, 2):
        scheduler.abort(number)
    assert (time.process_time() - began) / 20_000 < 200e-6


def test_a_deadline_is_kept_however_many_alarms_are_stale(clock: Any) -> None:
    """A request whose arrival makes the queue throw out stale alarms keeps its own."""
    scheduler = full_scheduler(clock)
    for number in range(1, 200):
        add(scheduler, clock, number, 50_000.0)
        if number > 100:
            scheduler.abort(number - 100)
    last = 200
    for number in range(100, 200):
        scheduler.abort(number)
        add(scheduler, clock, last, 100.0)
        clock.ms += 200
        scheduler.plan()
        assert [request.request_id for request in scheduler.expired()] == [last]
        last += 1
