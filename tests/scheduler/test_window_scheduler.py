"""What a batch window does to the scheduler's plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from firsttoken.core.clock import NS_PER_MS, clock_replaced
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import PlannedStep, Scheduler, SchedulerConfig, TokenCap
from firsttoken.scheduler.step_time import StepLoad
from firsttoken.scheduler.window import BatchWindow, StaticWindow


class Machine:
    """A scheduler on a clock that the test sets, and whose steps end when it says so."""

    def __init__(self, window: BatchWindow | None, targets: Targets, slots: int = 4) -> None:
        self.ms = 0.0
        kv = KVCache(KVFormat(dtype="bfloat16", layers=1, kv_heads=1, head_dim=1), 100, model="test")
        config = SchedulerConfig(max_num_seqs=slots, max_model_len=1000)
        self.scheduler = Scheduler(config, kv, TokenCap(512, 256), targets=targets, window=window)
        self._next = 0

    def read(self) -> int:
        return round(self.ms * NS_PER_MS)

    def add(self, service: ServiceClass = ServiceClass.P2, output: int = 50) -> int:
        number, self._next = self._next, self._next + 1
        prompt = (number + 1).to_bytes(4, "little") * 32
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        wire = EngineRequest(id=number, prompt=prompt, params=params, seed=0, max_tokens=output, service=service)
        self.scheduler.add(Request(wire))
        return number

    def starts(self) -> list[int]:
        """Plan and complete a step; who started in it."""
        planned = self.scheduler.plan()
        if planned is None:
            return []
        self.complete(planned)
        return [start.request_id for start in planned.plan.starts]

    def complete(self, planned: PlannedStep) -> None:
        samples = [RowSample(work.slot, 7) for work in planned.plan.work if work.sample]
        self.scheduler.complete(planned, StepResult(planned.plan.step_id, samples))


PATIENT = Targets(p0=ClassTargets())


@pytest.fixture
def held() -> Iterator[Machine]:
    machine = Machine(StaticWindow(20), PATIENT)
    with clock_replaced(machine.read):
        yield machine


def test_without_a_window_nothing_is_held() -> None:
    machine = Machine(None, PATIENT)
    with clock_replaced(machine.read):
        machine.add()
        assert machine.scheduler.wake_ns == 0
        assert machine.starts() == [0]


def test_who_comes_within_the_window_starts_in_one_step(held: Machine) -> None:
    held.add()
    assert held.starts() == []
    assert held.scheduler.wake_ns == 20 * NS_PER_MS
    held.ms = 12
    held.add()
    assert held.starts() == []
    assert held.scheduler.wake_ns == 20 * NS_PER_MS
    held.ms = 20
    assert held.starts() == [0, 1]
    assert held.scheduler.wake_ns == 0


def test_decode_rows_go_on_while_others_are_held(held: Machine) -> None:
    held.add()
    held.ms = 20
    held.starts()
    held.add()
    tokens = held.scheduler.counters.output_tokens
    assert held.starts() == []
    assert held.scheduler.counters.output_tokens == tokens + 1
    held.ms = 40
    assert held.starts() == [1]


def test_a_running_prompt_goes_on_with_all_tokens_while_others_are_held() -> None:
    machine = Machine(StaticWindow(20), PATIENT)
    with clock_replaced(machine.read):
        machine.scheduler.add(
            Request(
                EngineRequest(
                    id=99, prompt=b"\1\0\0\0" * 900, params=SamplingParams(max_tokens=1), seed=0, max_tokens=1
                )
            )
        )
        machine.ms = 20
        machine.starts()
        machine.add()
        planned = machine.scheduler.plan()
        assert planned is not None
        assert [work.count for work in planned.plan.work] == [900 - 512]


def test_a_class_with_max_queue_goes_at_once_with_all_that_are_held() -> None:
    machine = Machine(StaticWindow(50), Targets(p0=ClassTargets(max_queue=10)))
    with clock_replaced(machine.read):
        machine.add()
        assert machine.starts() == []
        machine.ms = 5
        machine.add(ServiceClass.P0)
        assert sorted(machine.starts()) == [0, 1]


def test_nobody_is_preempted_for_who_is_held() -> None:
    machine = Machine(StaticWindow(20), PATIENT, slots=1)
    with clock_replaced(machine.read):
        machine.add()
        machine.ms = 20
        machine.starts()
        machine.add(ServiceClass.P0)
        assert machine.starts() == []
        assert machine.scheduler.counters.preemptions == 0
        machine.ms = 40
        assert machine.starts() == [1]
        assert machine.scheduler.counters.preemptions == 1


def test_a_hold_is_over_when_all_that_waited_are_gone(held: Machine) -> None:
    held.scheduler.abort(held.add())
    assert held.starts() == []
    assert held.scheduler.wake_ns == 0


def test_a_window_hears_of_arrivals_and_first_tokens() -> None:
    class Listener(BatchWindow):
        def __init__(self) -> None:
            self.heard: list[tuple[str, float]] = []

        def arrived(self, now_ns: int, tokens: int) -> None:
            self.heard.append(("arrived", tokens))

        def first_token(self, now_ns: int, took_ms: float, waiting: int) -> None:
            self.heard.append(("token", took_ms))

        def hold_until_ns(self, now_ns: int, oldest_ns: int, waiting: int, load: StepLoad) -> int:
            return oldest_ns

    listener = Listener()
    machine = Machine(listener, PATIENT)
    with clock_replaced(machine.read):
        machine.add()
        planned = machine.scheduler.plan()
        assert planned is not None
        machine.ms = 8
        machine.complete(planned)
        machine.starts()
    assert listener.heard == [("arrived", 32), ("token", 8.0)]
