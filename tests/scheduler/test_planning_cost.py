"""What planning costs the host. Times are the least of many steps, since others' work on the machine only adds; limits
are a few times what was measured, so that only another order of growth breaks them."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from time import thread_time_ns
from typing import Any

import pytest

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Scheduler, SchedulerConfig, TokenCap

pytestmark = pytest.mark.clock

PARAMS = SamplingParams(max_tokens=3000)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Engine:
    """``running`` requests that decode, and ``waiting`` ones of all classes, from 50 tenants, with deadlines."""

    def __init__(
        self,
        running: int,
        waiting: int,
        *,
        blocks: int = 100_000,
        running_class: int | None = None,
        max_tokens: int = 3000,
    ) -> None:
        kv = KVCache(KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8), blocks, model="none")
        config = SchedulerConfig(max_num_seqs=running, max_model_len=4000)
        self.scheduler = Scheduler(config, kv, TokenCap(1 << 20, 512))
        self.count = 0
        self.max_tokens = max_tokens
        for number in range(running):
            self.add(service=number % 3 if running_class is None else running_class, tenant=f"t{number % 50}")
        while self.scheduler.num_running < running:
            self.step_us()
        for _ in range(3):
            self.step_us()
        for number in range(waiting):
            fields = {"tenant": f"t{number % 50}", "share": 1.0 + number % 3, "priority": number % 5}
            self.add(service=2, deadline_ns=1 << 62, **fields)

    def add(self, prompt: int = 40, **fields: Any) -> Request:
        self.count += 1
        tokens = array("I", [self.count] + [7] * (prompt - 1)).tobytes()
        wire = EngineRequest(id=self.count, prompt=tokens, params=PARAMS, seed=0, max_tokens=self.max_tokens, **fields)
        request = Request(wire)
        self.scheduler.add(request)
        return request

    def step_us(self) -> float:
        began = thread_time_ns()
        planned = self.scheduler.plan()
        took = thread_time_ns() - began
        assert planned is not None
        samples = [RowSample(work.slot, 1) for work in planned.plan.work if work.sample]
        self.scheduler.complete(planned, StepResult(planned.plan.step_id, samples))
        return took / 1e3

    def least_us(self, steps: int = 60) -> float:
        return min(self.step_us() for _ in range(steps))


def test_a_step_with_256_running_and_1000_waiting_is_planned_in_300_us() -> None:
    assert Engine(256, 1000).least_us() < 300


def test_planning_does_not_grow_with_what_waits() -> None:
    few, many = Engine(64, 64).least_us(), Engine(64, 4000).least_us()
    assert many < 1.5 * few + 20


def test_planning_grows_no_faster_than_what_runs() -> None:
    small, large = Engine(64, 1000).least_us(), Engine(512, 1000).least_us()
    assert large < 8 * small * 1.3


def test_taking_a_slot_from_a_worse_class_costs_less_than_two_more_steps() -> None:
    """Both in turn, since what else the machine does changes what either takes."""
    engine = Engine(256, 1000, running_class=2)
    plain, taking = [], []
    for _ in range(40):
        plain.append(engine.step_us())
        engine.add(service=0, tenant="urgent")
        taking.append(engine.step_us())
    assert engine.scheduler.counters.preemptions == 40
    assert min(taking) < 3 * min(plain) + 100


def test_a_better_request_for_which_nobody_can_make_way_costs_little() -> None:
    """The worse ones have not enough blocks together, so nobody goes; the next steps do not count them again."""
    engine = Engine(64, 0, blocks=64 * 3 + 64 * 4, running_class=2, max_tokens=50)
    plain = engine.least_us(10)
    engine.add(prompt=3500, service=0)
    big = engine.add(prompt=3900, service=1)
    times = [engine.step_us() for _ in range(20)]
    assert not big.first_scheduled
    assert min(times) < 2 * plain + 100
