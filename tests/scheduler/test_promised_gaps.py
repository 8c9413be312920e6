"""The scheduler tells the budget how long the rows of a step may wait for their next token."""

from __future__ import annotations

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Budget, Scheduler, SchedulerConfig
from firsttoken.scheduler.step_time import StepLoad

TARGETS = Targets(p0=ClassTargets(itl_p99=20), p1=ClassTargets(itl_p99=40))


class Listener:
    most = 64

    def __init__(self) -> None:
        self.heard: list[tuple[int, float | None]] = []

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        self.heard.append((load.decode_rows, gap_ms))
        return 64

    def limited(self, alone: int | None, mixed: int | None) -> Budget:
        return self


def heard_with(*services: ServiceClass) -> tuple[int, float | None]:
    """What the budget hears when one of each class decodes and another request comes."""
    listener = Listener()
    kv = KVCache(KVFormat(dtype="bfloat16", layers=1, kv_heads=1, head_dim=1), 100, model="test")
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_model_len=100), kv, listener, targets=TARGETS)
    for number, service in enumerate([*services, ServiceClass.P2]):
        prompt = (number + 1).to_bytes(4, "little") * 16
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        wire = EngineRequest(id=number, prompt=prompt, params=params, seed=0, max_tokens=50, service=service)
        scheduler.add(Request(wire))
        planned = scheduler.plan()
        assert planned is not None
        samples = [RowSample(work.slot, 7) for work in planned.plan.work if work.sample]
        scheduler.complete(planned, StepResult(planned.plan.step_id, samples))
    return listener.heard[-1]


def test_the_shortest_promise_of_those_who_decode_counts() -> None:
    assert heard_with(ServiceClass.P1, ServiceClass.P0, ServiceClass.P2) == (3, 18.0)
    assert heard_with(ServiceClass.P2, ServiceClass.P1) == (2, 36.0)


def test_nobody_who_decodes_was_promised_anything() -> None:
    assert heard_with(ServiceClass.P2) == (1, None)
    assert heard_with() == (0, None)
