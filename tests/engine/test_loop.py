"""The real loop, scheduler and KV cache around a scripted executor, at every depth of pipelining."""

from __future__ import annotations

import time

import msgspec
import pytest

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.step_sizes import StepSizes
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import Wait
from firsttoken.engine import loop as loop_module
from firsttoken.engine import step_recorder
from firsttoken.engine.step_gauges import StepGauges
from firsttoken.scheduler.step_learner import LEARN_EVERY, LearningStepTime, StepKind
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad
from firsttoken.transport.messages import Abort, Failed, Refused, StepTimeErrors
from tests.support.scripted_engine import ask, count_up


def test_many_requests_get_their_own_tokens(start, depth):
    engine = start(count_up, depth=depth)
    engine.submit(*(ask(i, range(i * 100, i * 100 + 5 + 9 * i), max_tokens=3 + i) for i in range(10)))
    tokens, last, stats = engine.collect(range(10))
    for i in range(10):
        first = i * 100 + 5 + 9 * i
        assert tokens[i] == list(range(first, first + 3 + i))
        assert last[i].finish_reason == "length"
        marks = [mark for mark, _ in last[i].stamps]
        assert marks[0] == Mark.ARRIVED
        assert marks[-1] == Mark.FINISHED
        assert Mark.FIRST_TOKEN in marks
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
    assert stats.output_tokens == sum(3 + i for i in range(10))
    assert stats.finished == 10


def test_a_stop_id_ends_the_request_with_that_token(start, depth):
    engine = start(count_up, depth=depth)
    engine.submit(ask(1, [5], max_tokens=50, stop_ids=(9,)))
    tokens, last, _ = engine.collect([1])
    assert tokens[1] == [6, 7, 8, 9]
    assert (last[1].finish_reason, last[1].stop_reason) in (("stop", None), ("stop", 9))


def test_what_has_not_started_by_its_deadline_ends_and_says_so(start, depth):
    engine = start(count_up, depth=depth, seqs=1, step_s=0.005)
    soon = now_ns() + 20_000_000
    engine.submit(
        ask(1, [5], max_tokens=30, deadline_ns=soon), ask(2, [7], deadline_ns=soon), ask(3, [9], max_tokens=2)
    )
    tokens, last, stats = engine.collect([1, 2, 3])
    assert (len(tokens[1]), last[1].finish_reason) == (30, "length")
    assert (tokens[2], last[2].finish_reason) == ([], "error")
    assert last[2].error.startswith("deadline exceeded: the request had not started")
    assert [last[i].code for i in (1, 2, 3)] == [None, "deadline_exceeded", None]
    assert Mark.SCHEDULED not in [mark for mark, _ in last[2].stamps]
    assert tokens[3] == [10, 11]
    assert stats.failed == 1


def test_a_pool_too_small_for_all_preempts_and_loses_nothing(start, depth):
    engine = start(count_up, depth=depth, blocks=12, seqs=12)  # of lengths not learned little is kept
    engine.submit(*(ask(i, range(i * 1000, i * 1000 + 30), max_tokens=60) for i in range(4)))
    tokens, _last, stats = engine.collect(range(4))
    for i in range(4):
        assert tokens[i] == list(range(i * 1000 + 30, i * 1000 + 90))
    assert stats.preemptions >= 1
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)


def test_an_abort_frees_everything_at_once_and_others_go_on(start, depth):
    engine = start(count_up, depth=depth, step_s=0.002)
    engine.submit(ask(1, range(40), max_tokens=200), ask(2, range(500, 540), max_tokens=20))
    engine.client.send(Abort([1, 77]))
    tokens, last, stats = engine.collect([1, 2])
    assert last[1].finish_reason == "abort"
    assert len(tokens[1]) < 200
    assert tokens[2] == list(range(540, 560))
    assert stats.aborted == 1
    assert (stats.running, stats.kv_used) == (0, 0)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(start):
    engine = start(count_up, blocks=8, max_len=10_000)
    engine.submit(ask(1, range(500)), ask(2, [1], max_tokens=1))
    _, last, _ = engine.collect([1, 2])
    assert isinstance(last[1], Refused)
    assert "500" in last[1].message
    assert last[2].finish_reason == "length"


def test_a_prefix_is_reused(start, depth):
    engine = start(count_up, depth=depth)
    prompt = list(range(70))
    engine.submit(ask(1, prompt))
    engine.collect([1])
    engine.submit(ask(2, prompt))
    tokens, last, _ = engine.collect([2])
    assert last[2].cached_tokens == 64
    assert tokens[2] == list(range(70, 78))


def test_decode_rows_come_first_and_a_long_prompt_is_cut_into_chunks(start):
    engine = start(count_up, depth=1, step_s=0.001)
    engine.submit(ask(1, [1], max_tokens=100))
    engine.submit(ask(2, range(1000, 1200), max_tokens=2))
    engine.collect([1, 2])
    later = [plan for plan in engine.executor.plans if not plan.starts]
    mixed = [plan for plan in later if len(plan.work) == 2 and plan.work[1].count > 1]
    assert mixed, "the prompt never shared a step with the decode row"
    for plan in mixed:
        assert (plan.work[0].count, plan.work[0].sample) == (1, True)
        assert plan.work[1].count <= 16


def test_a_step_that_raises_fails_the_engine_and_says_so(start):
    engine = start(count_up)
    engine.executor.fail_at = 2
    engine.submit(ask(1, [1], max_tokens=100))
    while not isinstance(message := engine.messages.get(timeout=5), Failed):
        pass
    assert "scripted failure" in message.message
    assert engine.closed.wait(5)
    engine.thread.join(5)
    assert isinstance(engine.error, RuntimeError)


def test_a_device_that_fails_in_closing_leaves_the_channel_closed(start, monkeypatch):
    engine = start(count_up)

    def fail():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.executor, "close", fail)
    engine.stop()
    assert engine.closed.wait(5)
    assert "the device is gone" in str(engine.error)


def test_what_a_step_brought_is_told_before_the_executor_settles(start, depth, monkeypatch):
    """It may wait there for the masks of rows that are held to grammars."""
    engine = start(count_up, depth=depth)
    untold = []
    monkeypatch.setattr(engine.executor, "settle", lambda: untold.append(len(engine.loop._deltas)))
    engine.submit(ask(1, [5], max_tokens=6), ask(2, [7], max_tokens=6))
    engine.collect([1, 2])
    assert len(untold) >= 6
    assert not any(untold)


def test_an_idle_engine_beats(start):
    engine = start(count_up)
    first = engine.messages.get(timeout=5).stats
    second = engine.messages.get(timeout=5).stats
    assert second.heartbeat_ns > first.heartbeat_ns
    assert second.steps == 0


def test_totals_are_made_now_and_then_and_whenever_a_request_has_ended(start, monkeypatch):
    monkeypatch.setattr(loop_module, "STATS_NS", 10**12)
    engine = start(count_up)
    engine.submit(ask(1, [5], max_tokens=6), ask(2, [5], max_tokens=12))
    told = []
    while not told or not any(delta.id == 2 and delta.finish_reason for delta in told[-1].deltas):
        told.append(engine.messages.get(timeout=5))
    steps = [message.stats.steps for message in told if message.deltas]
    assert steps == [steps[0]] * 5 + [6] * 6 + [12]


def test_the_wait_for_a_processor_is_asked_for_now_and_then(start, monkeypatch):
    engine = start(count_up)
    monkeypatch.setattr(step_recorder, "RUN_QUEUE_NS", 10**15)
    engine.loop._recorder._run_queue_asked_ns = -(10**15)
    monkeypatch.setattr(step_recorder.RunQueueClock, "take", lambda clock: 7)
    engine.submit(ask(1, [5], max_tokens=4))
    engine.collect([1])
    engine.stop()
    assert [record.run_queue_ns for record in engine.loop.ledger.snapshot()] == [7, 0, 0, 0]


def test_the_ledger_counts_rows_and_chunks(start):
    engine = start(count_up)
    engine.submit(ask(1, range(20), max_tokens=30), ask(2, range(100, 200), max_tokens=2))
    engine.collect([1, 2])
    engine.stop()
    records = engine.loop.ledger.snapshot()
    for record, plan in zip(records, engine.executor.plans, strict=True):
        assert record.decode_rows + record.prefill_tokens == plan.num_tokens
        assert record.context_tokens == sum(row.start + row.count for row in plan.work)
    assert any(record.decode_rows and record.prefill_tokens for record in records)


def test_the_ledger_has_a_record_of_every_step(start):
    engine = start(count_up)
    engine.submit(ask(1, range(20), max_tokens=5))
    engine.collect([1])
    engine.stop()
    records = engine.loop.ledger.snapshot()
    assert len(records) == len(engine.executor.plans) == 5
    assert records[0].prefill_tokens == 20
    assert [record.decode_rows for record in records[1:]] == [1, 1, 1, 1]
    assert all(r.planned_ns <= r.submitted_ns <= r.harvested_ns for r in records)


def told_steps(engine, ids):
    """The records that came with the answers of these requests, and how many messages brought some."""
    records, messages, ended = [], 0, set()
    while ended < set(ids):
        message = engine.messages.get(timeout=20)
        records += message.steps
        messages += bool(message.steps)
        ended |= {delta.id for delta in message.deltas if delta.finish_reason}
    return records, messages


def test_whoever_hears_of_an_end_has_heard_of_all_steps_before_it(start, depth, monkeypatch):
    monkeypatch.setattr(step_recorder, "TELL_NS", 10**15)
    engine = start(count_up, depth=depth)
    engine.submit(ask(1, range(40), max_tokens=6), ask(2, range(100, 140), max_tokens=3))
    records, messages = told_steps(engine, [1, 2])
    engine.stop()
    assert messages == 2  # the records are told when a request ends, and here nobody asks for more
    kept = engine.loop.ledger.snapshot()
    assert records == kept[: len(records)]
    assert sum(record.prefill_tokens for record in records) == 80
    named = [record.prefill_requests for record in records if record.prefill_tokens]
    assert {number for numbers in named for number in numbers} == {1, 2}
    assert not any(record.prefill_requests for record in records if not record.prefill_tokens)
    assert sum(record.prefill_pairs for record in records) == 2 * 40 * 41 // 2


def test_steps_are_told_ten_times_a_second_without_an_end(start):
    engine = start(count_up, step_s=0.004)
    engine.submit(ask(1, [5], max_tokens=120))
    records, messages = told_steps(engine, [1])
    took_s = (records[-1].harvested_ns - records[0].planned_ns) / 1e9
    assert len(records) == 120
    assert 2 <= messages <= took_s * 10 + 2


def test_a_step_says_who_lost_their_place(start):
    engine = start(count_up, blocks=12, seqs=12)
    engine.submit(*(ask(i, range(i * 1000, i * 1000 + 30), max_tokens=60) for i in range(4)))
    _, _, stats = engine.collect(range(4))
    assert stats.preemptions > 0
    assert sum(record.preempted for record in engine.loop.ledger.snapshot()) == stats.preemptions


def test_an_engine_that_fails_has_told_of_its_steps_before(start):
    engine = start(count_up)
    engine.executor.fail_at = 5
    engine.submit(ask(1, [5], max_tokens=50))
    steps, message = [], None
    while not isinstance(message, Failed):
        message = engine.messages.get(timeout=5)
        steps += getattr(message, "steps", [])
        if not isinstance(message, Failed):
            assert message.stats.steps <= 5
    assert [record.decode_rows + record.prefill_tokens for record in steps] == [1] * 5


def test_the_model_of_step_times_learns_from_what_is_run(start, monkeypatch):
    monkeypatch.setattr(loop_module, "LEARN_NS", 10**15)
    engine = start(count_up, step_s=0.005)
    engine.loop._learned_ns = now_ns()
    engine.submit(ask(1, range(4), max_tokens=200))
    engine.collect([1])
    assert engine.step_time.errors(StepKind.PREFILL).steps == 1
    assert engine.step_time.errors(StepKind.DECODE).steps == 199 // LEARN_EVERY, "steps of decode rows are all alike"
    assert 3 < engine.step_time.ms(StepLoad(1, 20, 0, 0)) < 30, "by the prior it is a step of a millisecond"


def test_slow_steps_are_learned_from_by_time(start):
    engine = start(count_up, step_s=0.02)
    engine.submit(ask(1, range(4), max_tokens=29))
    began = now_ns()
    engine.collect([1])
    most = 2 + (now_ns() - began) / loop_module.LEARN_NS
    assert 4 <= engine.step_time.errors(StepKind.DECODE).steps <= most


def test_how_far_predictions_were_off_is_told(start):
    engine = start(count_up, step_s=0.001)
    engine.submit(ask(1, range(4), max_tokens=100), ask(2, range(100, 150), max_tokens=4))
    _, _, stats = engine.collect([1, 2])
    told = now_ns()
    while now_ns() - told < 600 * NS_PER_MS:
        stats = engine.messages.get(timeout=5).stats  # heartbeats
    assert {"decode", "prefill"} <= stats.step_time_errors.keys()
    assert stats.step_time_errors == {
        name: StepTimeErrors(*engine.step_time.errors(kind))
        for name, kind in (("decode", StepKind.DECODE), ("mixed", StepKind.MIXED), ("prefill", StepKind.PREFILL))
        if engine.step_time.errors(kind).steps
    }
    assert stats.step_time_errors["prefill"].p90 >= stats.step_time_errors["prefill"].median > 0


def test_the_errors_are_sorted_at_most_twice_a_second():
    asked = []

    class Counting(LearningStepTime):
        def errors(self, kind):
            asked.append(kind)
            return super().errors(kind)

    gauges = StepGauges(Counting(FittedStepTime(StepSizes(), ((1, 1.0), (2, 2.0)), 0.0, 0.0, 0.0)))
    for ms in range(0, 1000, 10):
        assert gauges.read(7 + ms * NS_PER_MS) == {}
    assert len(asked) == 2 * len(StepKind)


def test_a_step_that_took_longer_than_others_of_its_shape_will_teaches_nothing(start):
    engine = start(count_up, step_s=0.02)
    engine.executor.typical = False
    engine.submit(ask(1, range(4), max_tokens=40))
    engine.collect([1])
    assert all(engine.step_time.errors(kind).steps == 0 for kind in StepKind)


def test_who_comes_while_a_step_runs_is_part_of_the_next_one(start):
    """Two steps may be in flight, but the second is planned when the first is about to end."""
    engine = start(count_up, depth=2, step_s=0.03, seqs=8, max_len=2000, blocks=600)
    teach(engine, 30.0)
    engine.submit(ask(1, range(4), max_tokens=1000))
    executor, joined = engine.executor, []
    for number in range(2, 8):
        running = len(executor.plans)
        while len(executor.plans) == running:
            time.sleep(0.001)
        time.sleep(0.005)
        running = len(executor.plans)  # the step of this number runs, counted from 1
        engine.submit(ask(number, range(3), max_tokens=2))
        while not (at := [n for n, plan in enumerate(executor.plans, 1) if number in _started(plan)]):
            time.sleep(0.001)
        joined.append(at[0] - running)
    assert sorted(joined)[3] == 1, joined
    engine.client.send(Abort([1]))


def test_who_comes_while_a_step_runs_waits_for_the_next_plan_and_not_for_the_channel(start, depth):
    engine = start(count_up, depth=depth, step_s=0.05)
    engine.submit(ask(1, [5], max_tokens=12))
    time.sleep(0.12)
    asked = []
    for number in (2, 3, 4):
        asked.append(now_ns())
        engine.submit(
            msgspec.structs.replace(ask(number, [number], max_tokens=1), stamps=[(Mark.TOKENIZED, asked[-1])])
        )
        time.sleep(0.017)
    _, last, _ = engine.collect([1, 2, 3, 4])
    for number, handed in zip((2, 3, 4), asked, strict=True):
        (mark, arrived), *rest = last[number].stamps
        assert mark == Mark.ARRIVED
        assert 0 <= arrived - handed < 10 * NS_PER_MS, "it did not wait for the channel"
        waits = last[number].spent.queue_ns
        assert sum(waits) == rest[0][1] - arrived
        assert waits[Wait.STEP] == max(waits)


@pytest.mark.clock
def test_the_way_to_an_idle_engine_is_no_queue(start):
    engine = start(count_up)
    time.sleep(0.1)
    handed = now_ns() - 30 * NS_PER_MS  # it was on its way for so long, while the loop had nothing to do but look
    engine.submit(msgspec.structs.replace(ask(1, [5], max_tokens=1), stamps=[(Mark.TOKENIZED, handed)]))
    _, last, _ = engine.collect([1])
    arrived = last[1].stamps[0][1]
    assert arrived - handed >= 30 * NS_PER_MS
    assert sum(last[1].spent.queue_ns) < 20 * NS_PER_MS


@pytest.mark.parametrize("ahead_ms", [-1e6, 60_000])
def test_a_clock_that_is_off_makes_no_time_negative(start, ahead_ms):
    engine = start(count_up, step_s=0.01)
    stamp = (Mark.TOKENIZED, now_ns() + round(ahead_ms * NS_PER_MS))
    engine.submit(ask(1, [5], max_tokens=4), msgspec.structs.replace(ask(2, [5], max_tokens=1), stamps=[stamp]))
    _, last, _ = engine.collect([1, 2])
    times = [stamp[1], *(ns for _, ns in last[2].stamps)]
    assert times == sorted(times)
    assert min(last[2].spent.queue_ns) >= 0


@pytest.mark.clock
def test_a_device_that_ends_sooner_than_foreseen_is_not_left_waiting(start):
    engine = start(count_up, depth=2, step_s=0.001)
    teach(engine, 100.0)
    began = time.monotonic()
    engine.submit(ask(1, range(4), max_tokens=20))
    engine.collect([1])
    assert time.monotonic() - began < 20 * 0.03


def teach(engine, ms):
    """That any step takes so long."""
    for _ in range(300):
        engine.step_time.learn(StepLoad(1, 20, 0, 0), ms)
        engine.step_time.learn(StepLoad(0, 0, 0, 0).with_chunk(0, 4), ms)
    assert engine.step_time.ms(StepLoad(1, 20, 0, 0)) == pytest.approx(ms, rel=0.2)


def _started(plan):
    return [row.request_id for row in plan.starts]
