"""What a plan says, how requests end, and what is counted and stamped."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.core.errors import ConfigError, InvalidRequest
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.timeline import Mark
from firsttoken.scheduler import SchedulerConfig, TokenCap


def unlike(number: int, length: int) -> list[int]:
    return [100 + number] + [7] * (length - 1)


def test_a_prompt_is_computed_in_chunks_and_only_the_last_samples(world: Any) -> None:
    w = world(blocks=16, alone=5, mixed=3)
    request = w.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 3)
    rows = [w.step().plan.work[0] for _ in range(5)]
    assert [(row.start, row.count, row.sample) for row in rows] == [
        (0, 5, False),
        (5, 5, False),
        (10, 2, True),
        (12, 1, True),
        (13, 1, True),
    ]
    assert request.finish_reason == "length"
    assert w.step() is None


def test_several_prompts_share_a_step_and_decodes_come_first(world: Any) -> None:
    w = world(blocks=32, slots=4, alone=20, mixed=12)
    first = w.add(unlike(0, 3), 9)
    w.step()
    second, third = w.add(unlike(1, 5), 4), w.add(unlike(2, 6), 4)
    planned = w.step()
    assert planned.requests == [first, second, third]
    assert [row.count for row in planned.plan.work] == [1, 5, 6]
    w.drain()


def test_planning_may_run_ahead_of_results(world: Any) -> None:
    w = world(blocks=16)
    request = w.add([1, 2, 3], 3)
    plans = [w.plan() for _ in range(4)]
    assert plans[3] is None, "three samples are all it may have"
    assert (request.num_pending, request.num_computed) == (3, 5)
    assert [w.complete()[0].finished for _ in range(3)] == [False, False, True]
    assert request.finish_reason == "length"


def test_results_after_a_stop_are_dropped_and_the_slot_is_retired_once(world: Any) -> None:
    w = world(blocks=16, slots=1)
    request = w.add([1, 2, 3], 8, stop_ids=(0, 1, 2, 3, 4))
    w.plan()
    w.plan()  # the row goes on, because nobody knows yet
    (update,) = w.complete()
    assert update.finished
    assert request.finish_reason == "stop"
    assert request.stop_reason is None, "an end token of the model is no stop_reason"
    following = w.add(unlike(1, 3), 1)
    planned = w.plan()
    assert planned.plan.retire == [0]
    assert planned.plan.starts[0].request_id == following.request_id
    assert w.complete() == []
    w.drain()


def test_stop_reason_names_the_callers_stop_token(world: Any) -> None:
    w = world(blocks=16)
    request = w.add([1, 2, 3], 8, stop_ids=(0, 1, 2, 3, 4), stop_token_ids=(0, 1, 2, 3, 4))
    w.drain()
    assert request.finish_reason == "stop"
    assert request.stop_reason == request.tokens[-1]


def test_min_tokens_holds_even_if_the_executor_lets_a_stop_token_through(world: Any) -> None:
    w = world(blocks=16)
    request = w.add([1, 2, 3], 8, stop_ids=(0,), min_tokens=2)
    for expected in (None, None, "stop"):
        planned = w.plan()
        w.in_flight.clear()
        w.scheduler.complete(planned, StepResult(planned.plan.step_id, [RowSample(planned.plan.work[0].slot, 0)]))
        w.streamed[1].append(0)
        assert request.finish_reason == expected


def test_max_model_len_ends_a_request_like_max_tokens(world: Any) -> None:
    w = world(blocks=16, max_model_len=12)
    request = w.add([1, 2, 3, 4, 5, 6, 7, 8], 100)
    w.drain()
    assert (request.num_tokens, request.finish_reason) == (12, "length")


def test_what_can_never_fit_is_refused_with_the_numbers(world: Any) -> None:
    w = world(blocks=4, max_model_len=20)
    with pytest.raises(InvalidRequest, match=r"25 tokens.*at most 20.*shorten the prompt to 19") as context:
        w.add([1] * 25, 4)
    assert context.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match=r"need 5 KV blocks of 4 tokens, but the cache has 4.*at most 17") as kv:
        w.add([1] * 10, 8)
    assert kv.value.code == "kv_capacity_exceeded"
    with pytest.raises(InvalidRequest, match="no tokens"):
        w.add([], 4)
    with pytest.raises(InvalidRequest, match="max_tokens must be 1 or more, got -1"):
        w.add([1], -1)
    exactly = w.add([1] * 10, 7)  # 17 tokens, the KV of the last is not needed
    w.drain()
    assert exactly.num_output == 7


def test_a_live_id_is_not_taken_twice(world: Any) -> None:
    w = world(blocks=4)
    request = w.add([1], 1)
    with pytest.raises(ValueError, match="unique"):
        w.scheduler.add(request)


def test_abort_frees_at_once_wherever_the_request_is(world: Any) -> None:
    w = world(blocks=8, slots=1, alone=4)
    running, queued = w.add(unlike(0, 9), 4), w.add(unlike(1, 9), 4)
    w.plan()
    w.abort(queued.request_id)
    assert w.scheduler.num_waiting == 0
    w.abort(running.request_id)  # in the middle of its prompt, with a step in flight
    assert w.kv.stats().used == 0
    assert w.scheduler.num_running == 0
    assert w.scheduler.abort(running.request_id) is None
    assert w.scheduler.abort(999) is None
    w.drain()
    assert w.scheduler.counters.aborted == 2


def test_an_error_ends_one_request_and_its_kv_is_not_reused(world: Any) -> None:
    w = world(blocks=32, slots=4, alone=64)
    prompt = unlike(0, 13)
    bad, good = w.add(prompt, 4), w.add(unlike(1, 13), 4)
    w.executor.failing.add(bad.request_id)
    w.plan()
    errors = [update for update in w.complete() if update.error is not None]
    assert [(update.request, update.error, update.finished) for update in errors] == [(bad, "non-finite logits", True)]
    assert w.scheduler.counters.failed == 1
    again = w.add(prompt, 4)
    w.drain()
    assert again.num_cached == 0
    assert good.finish_reason == "length"


def test_results_must_come_in_order_and_for_the_planned_rows(world: Any) -> None:
    w = world(blocks=16)
    w.add([1, 2, 3], 3)
    first, second = w.plan(), w.plan()
    with pytest.raises(RuntimeError, match="in order"):
        w.scheduler.complete(second, w.in_flight[1][1])
    with pytest.raises(RuntimeError, match="planned were"):
        w.scheduler.complete(first, StepResult(first.plan.step_id, []))
    assert w.scheduler.num_in_flight == 2
    w.drain()


def test_equal_prompts_that_arrive_together_are_computed_once(world: Any) -> None:
    w = world(blocks=64, slots=8, alone=64, mixed=32)
    prompt = unlike(0, 33)
    requests = [w.add(prompt, 3) for _ in range(8)]
    assert w.plan().requests == requests[:1], "the others wait for the blocks that it computes"
    assert w.plan().requests == requests, "one step later, before any result"
    w.drain(depth=2)
    assert [request.num_cached for request in requests] == [0] + [32] * 7
    assert w.kv.stats().hit_tokens == 7 * 32


def test_cached_tokens_are_counted_at_first_admission_only(world: Any) -> None:
    w = world(blocks=32)
    w.add(unlike(0, 12), 2)
    w.drain()
    request = w.add(unlike(0, 12), 6)
    w.step()
    assert request.num_cached == 8, "full blocks, and never the whole prompt"
    w.step()
    w.scheduler.preempt(request.request_id)
    w.drain()
    assert request.num_cached == 8
    counters = w.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_prompt_tokens, counters.output_tokens) == (24, 8, 8)


def test_tenants_do_not_share(world: Any) -> None:
    w = world(blocks=64)
    hits = []
    for salt in ("", "a", "b", "a"):
        request = w.add(unlike(0, 12), 2, salt=salt)
        w.drain()
        hits.append(request.num_cached)
    assert hits == [0, 0, 0, 8]


def test_a_preempted_request_waits_for_its_pending_token(world: Any) -> None:
    w = world(blocks=16)
    request = w.add([1, 2, 3], 4)
    w.plan()
    w.scheduler.preempt(request.request_id)
    assert request.num_computed == 0
    assert w.plan() is None
    (update,) = w.complete()
    assert update.token is not None, "a token in flight of a preempted request counts"
    row = w.plan().plan.work[0]
    assert row.start + row.count == 4
    w.drain()


def test_better_classes_start_first_then_lower_priority_then_preempted_ones_then_by_arrival(world: Any) -> None:
    w = world(blocks=64, slots=1, alone=64)
    ranks = [(1, 0), (2, -5), (0, 3), (1, 0), (1, -1)]
    order = [w.add(unlike(i, 3), 2, service=service, priority=rank) for i, (service, rank) in enumerate(ranks)]
    w.step()
    assert order[2].request_id in w.first_token_step
    w.scheduler.preempt(order[2].request_id)
    w.drain()
    by_start = sorted(order, key=lambda request: w.first_token_step[request.request_id])
    assert by_start == [order[2], order[4], order[0], order[3], order[1]]


def test_a_preempted_one_starts_again_before_those_that_it_had_passed(world: Any) -> None:
    w = world(blocks=16, slots=3, alone=64, options={"max_passes": 1})
    w.add(unlike(0, 36), 12)
    w.step()
    w.add(unlike(1, 40), 2)  # does not fit
    small = w.add(unlike(2, 3), 2)
    w.plan()
    w.scheduler.preempt(small.request_id)
    w.complete()
    assert w.step().plan.starts[0].request_id == small.request_id
    w.drain()


def test_the_timeline_says_when_decode_begins_again(world: Any) -> None:
    w = world(blocks=16)
    request = w.add([1, 2, 3], 4)
    w.plan()
    w.scheduler.preempt(request.request_id)
    w.complete()  # its first token, while it waits
    w.drain()
    assert [Mark(mark).name for mark in request.timeline.marks] == [
        "ARRIVED",
        "SCHEDULED",
        "PREEMPTED",
        "FIRST_TOKEN",
        "PREEMPTED",
        "SCHEDULED",
        "FIRST_TOKEN",
        "FINISHED",
    ]


def test_the_watermark_leaves_blocks_to_running_decodes(world: Any) -> None:
    w = world(blocks=20, slots=4, alone=64, mixed=64, options={"watermark": 0.1})
    w.add(unlike(0, 40), 4)  # 11 blocks in the end
    w.step()
    w.add(unlike(1, 36), 2)  # 9 blocks: all that is left
    planned = w.step()
    assert len(planned.requests) == 1
    w.drain()
    assert w.scheduler.counters.preemptions == 0


def test_a_long_newcomer_does_not_slow_the_long_prompt_before_it(world: Any) -> None:
    w = world(blocks=64, slots=4, alone=8, mixed=8)
    first = w.add(unlike(0, 40), 2)
    w.step()
    second = w.add(unlike(1, 40), 2)
    for _ in range(4):
        planned = w.step()
        assert second not in planned.requests
    assert first.request_id in w.first_token_step
    w.drain()


def test_no_one_is_preempted_for_a_request_that_must_wait_its_turn_anyway(world: Any) -> None:
    w = world(blocks=64, slots=2, alone=8, mixed=8)
    low = w.add(unlike(0, 4), 30, service=2)
    w.step()
    w.add(unlike(1, 40), 2, service=0)
    w.step()
    w.add(unlike(2, 60), 2, service=0)  # longer than what the one before it still wants
    w.step()
    assert low.preemptions == 0
    w.add(unlike(3, 5), 2, service=0)
    w.drain()
    assert low.preemptions == 1, "in the end its slot is wanted"


def test_what_was_found_not_to_fit_is_not_looked_up_in_every_step(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(blocks=32, slots=4, alone=64, mixed=16)
    w.add(unlike(0, 64), 60)
    w.step()
    big = w.add(unlike(1, 80), 2)
    probed: list[int] = []
    probe = w.kv.probe
    monkeypatch.setattr(w.kv, "probe", lambda request: probed.append(w.steps) or probe(request))
    for _ in range(40):
        w.step()
    assert big.request_id not in w.first_token_step
    assert len(probed) == 3, "at first, then every 16 steps"
    w.drain()


def test_a_step_looks_at_a_few_waiting_requests_whatever_their_number(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(blocks=32, slots=4, alone=64, mixed=16)
    w.add(unlike(0, 64), 60)
    w.step()
    for number in range(1, 300):
        w.add(unlike(number, 80), 2)
    probes = 0

    def count(request: Any) -> Any:
        nonlocal probes
        probes += 1
        return probe(request)

    probe = w.kv.probe
    monkeypatch.setattr(w.kv, "probe", count)
    for _ in range(30):
        before = probes
        w.step()
        assert probes - before <= 8
    assert probes > 30


def test_a_plan_hashes_no_blocks_before_it_is_launched(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(blocks=16, alone=64, mixed=16)
    committed = []
    commit = w.kv.commit

    def counted(request: Any) -> None:
        committed.append(request)
        commit(request)

    monkeypatch.setattr(w.kv, "commit", counted)
    w.add(list(range(40)), 5)
    assert w.scheduler.plan() is not None
    assert not committed
    w.scheduler.plan()
    assert committed, "the next plan may find them"


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be 1 or more, got 0"):
        SchedulerConfig(max_num_seqs=0, max_model_len=1)
    with pytest.raises(ConfigError, match="watermark"):
        SchedulerConfig(max_num_seqs=1, max_model_len=1, watermark=1.0)
    with pytest.raises(ConfigError, match="max_passes"):
        SchedulerConfig(max_num_seqs=1, max_model_len=1, max_passes=-1)
    with pytest.raises(ConfigError, match="mixed"):
        TokenCap(alone=4, mixed=0)
