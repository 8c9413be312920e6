"""What a record says of padding and of moved KV."""

from __future__ import annotations

from types import SimpleNamespace

from firsttoken.core.plan import RowWork, StepPlan, StepResult
from firsttoken.engine.step_recorder import TELL_NS, StepRecorder
from firsttoken.kvcache.copy import Moved
from firsttoken.scheduler.step import PlannedStep
from firsttoken.scheduler.step_time import StepLoad


def add(recorder: StepRecorder, work: list[RowWork], **result: object) -> None:
    plan = StepPlan(7, work)
    requests = [SimpleNamespace(request_id=100 + row.slot) for row in work]
    planned = PlannedStep(plan, requests)  # type: ignore[arg-type]
    recorder.add(planned, StepLoad.of(plan), StepResult(7, [], **result), 1, 2, 9, 0)  # type: ignore[arg-type]


def test_padding_is_what_the_shape_has_and_the_step_has_not() -> None:
    recorder = StepRecorder()
    add(recorder, [RowWork(0, 9, 1, True), RowWork(1, 0, 20, True)], graph="d4p28", shape_tokens=32)
    add(recorder, [RowWork(0, 9, 1, True)])
    recorder.stop()
    padded, plain = recorder.ledger.snapshot()
    assert (padded.graph, padded.pad_tokens, padded.prefill_requests) == ("d4p28", 11, (101,))
    assert (padded.context_tokens, padded.prefill_pairs, padded.prefill_reach) == (30, 210, 20)
    assert padded.decode_context == 10
    assert (plain.graph, plain.pad_tokens, plain.prefill_requests) == ("", 0, ())


def test_of_many_prompts_the_first_are_named() -> None:
    recorder = StepRecorder()
    add(recorder, [RowWork(slot, 0, 3, True) for slot in range(20)])
    recorder.stop()
    assert recorder.ledger.snapshot()[0].prefill_requests == tuple(range(100, 108))


def test_moves_count_once_in_the_step_after_they_were_seen() -> None:
    inward, outward = Moved(), Moved()
    recorder = StepRecorder(SimpleNamespace(moved_in=inward, moved_out=outward))  # type: ignore[arg-type]
    work = [RowWork(0, 9, 1, True)]
    add(recorder, work)
    inward.add(1000, 2e-6)
    outward.add(50, 1e-6)
    outward.add(50, 1e-6)
    add(recorder, work)
    add(recorder, work)
    recorder.stop()
    found = [(one.copied_bytes_in, one.copied_bytes_out, one.copy_ns) for one in recorder.ledger.snapshot()]
    assert found == [(0, 0, 0), (1000, 100, 4000), (0, 0, 0)]


def test_records_are_due_when_there_are_some_and_time_has_passed() -> None:
    recorder = StepRecorder()
    assert not recorder.due(10**12)
    add(recorder, [RowWork(0, 9, 1, True)])
    assert recorder.due(10**12)
    assert len(recorder.take(10**12)) == 1
    add(recorder, [RowWork(0, 9, 1, True)])
    assert not recorder.due(10**12 + TELL_NS)
    assert recorder.due(10**12 + TELL_NS + 1)
    recorder.stop()
