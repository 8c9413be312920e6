"""The virtual run: time passes as steps take it, in the engine loop's order, through the real scheduler and cache."""

from __future__ import annotations

import gc
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.core.step_sizes import StepSizes
from firsttoken.scheduler import Budget, PlannedStep, Scheduler, TokenCap
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad
from firsttoken.scheduler.window import StaticWindow
from firsttoken.simulate.policies import POLICY_NAMES, Policy, find_policy
from firsttoken.simulate.run import EngineShape, Outcome, simulate
from firsttoken.simulate.step_total import StepTotal
from firsttoken.simulate.workload import Job

BUDGET = StepTotal(1024, row_profiles=(4, 16, 32, 64))
CAP = TokenCap(64, 16)
ENGINE = EngineShape(kv_blocks=100, max_num_seqs=4, max_model_len=1000, in_flight=2)
PRIOR = FittedStepTime(StepSizes(), ((1, 10.0), (2, 10.0)), 0.0, 0.0, 0.0)


def policy_of(name: str, budget: Budget) -> Policy:
    return find_policy(name, lambda _: budget, PRIOR)


@dataclass
class Fixed:
    """Each step takes ``step_ms``, and 1 ms more for each 16 prompt tokens. Remembers what it was asked."""

    step_ms: float = 10.0
    loads: list[StepLoad] = field(default_factory=list)

    def ms(self, load: StepLoad) -> float:
        self.loads.append(load)
        return self.step_ms + load.prefill_tokens / 16


def at(
    ms: float,
    tokens: int = 16,
    output: int = 3,
    blocks: tuple[int, ...] = (),
    service: ServiceClass = ServiceClass.P2,
    group: str = "",
) -> Job:
    return Job(round(ms * NS_PER_MS), tokens, output, blocks, service, group)


def run(jobs: list[Job], time: Fixed | None = None, *, policy: str = "default", **shape: int) -> Outcome:
    engine = EngineShape(
        **{
            "kv_blocks": ENGINE.kv_blocks,
            "max_num_seqs": ENGINE.max_num_seqs,
            "max_model_len": ENGINE.max_model_len,
            "in_flight": ENGINE.in_flight,
            **shape,
        }
    )
    return simulate(jobs, policy_of(policy, CAP), engine, time or Fixed())


def test_a_job_without_output_is_its_prompt_alone():
    outcome = simulate([at(0, output=0), at(1, output=3)], policy_of("default", CAP), ENGINE, Fixed())
    assert (outcome.output_tokens, outcome.left, sum(outcome.refused.values())) == (3, 0, 0)
    assert outcome.classes["p2"].result(1)["ttft_ms"]["max"] > 0


def test_a_lone_request_takes_its_steps() -> None:
    outcome = run([at(5, output=3)])
    figures = outcome.classes["p2"]
    # The prompt's step takes 11 ms, the two decode steps behind it 10 ms each.
    assert figures.ttft_ms == [11.0]
    assert figures.itl_ms == [10.0, 10.0]
    assert figures.e2e_ms == [31.0]
    assert outcome.steps == 3
    assert outcome.output_tokens == 3
    assert outcome.virtual_ns == 36 * NS_PER_MS


def test_a_request_joins_the_step_behind_the_one_that_runs() -> None:
    """Two steps may be in flight, but the second is planned when the first is about to end: as in the engine, where the
    device always has a step to go on with and who comes meanwhile is part of it."""
    jobs = [at(0, output=10), at(3, output=1)]
    # Steps end at 11, 22, ...: the late one is in the second, and so it is in lockstep.
    assert run(jobs).classes["p2"].ttft_ms == [11.0, 22.0 - 3.0]
    assert run(jobs, in_flight=1).classes["p2"].ttft_ms == [11.0, 22.0 - 3.0]
    # The next step is planned 2 ms before the end: at 9. Who comes later waits for a step more.
    assert run([at(0, output=10), at(10, output=1)]).classes["p2"].ttft_ms == [11.0, 32.0 - 10.0]


def test_stages_come_from_the_timeline_and_sum_to_the_whole() -> None:
    result = run([at(0, output=10), at(3, output=4)]).classes["p2"].result(10**9)
    stages = result["stages_ms"]
    assert sum(stages[name]["mean"] for name in stages) == pytest.approx(result["e2e_ms"]["mean"])
    assert stages["transport"]["max"] == 6.0  # from 3 to 9, when the engine looked


def test_the_device_rests_until_the_next_request() -> None:
    outcome = run([at(0, output=1), at(1000, output=1)])
    assert outcome.classes["p2"].ttft_ms == [11.0, 11.0]
    assert outcome.virtual_ns == 1011 * NS_PER_MS


def test_prompts_that_begin_alike_are_found_in_the_cache() -> None:
    time = Fixed()
    outcome = run([at(0, 600, 1, (7, 8)), at(500, 600, 1, (7, 9))], time, max_model_len=1000, kv_blocks=100)
    assert outcome.cached_prompt_tokens == 512
    assert outcome.hit_ratio == 512 / 1200
    assert sum(load.prefill_tokens for load in time.loads) == 600 + 88


def test_prompts_without_blocks_have_nothing_in_common() -> None:
    assert run([at(0, 600, 1), at(500, 600, 1)]).hit_ratio == 0.0


def test_what_cannot_ever_run_is_refused_and_counted() -> None:
    outcome = run([at(0, 1200), at(0, 16, 1), at(0, 1100)])
    assert dict(outcome.refused) == {"context_length_exceeded": 2}
    assert len(outcome.classes["p2"].ttft_ms) == 1


def test_who_is_preempted_still_ends() -> None:
    jobs = [*(at(0, 32, 60) for _ in range(4)), at(100, 32, 60, service=ServiceClass.P0), at(3000, 32, 60)]
    outcome = run(jobs, kv_blocks=26)
    assert outcome.preemptions > 0
    assert outcome.evictions > 0
    assert outcome.output_tokens == 6 * 60
    assert len(outcome.classes["p2"].itl_ms) == 5 * 59
    assert outcome.classes["p0"].start_ms[0] < 30


def test_goodput_counts_what_keeps_the_targets() -> None:
    jobs = [at(0, output=3), at(1000, 160, output=3)]  # the second's first token takes 20 ms
    for promised, good in (
        (ClassTargets(), 2),
        (ClassTargets(ttft_p99=12), 1),
        (ClassTargets(itl_p99=9.9), 0),
        (ClassTargets(ttft_p99=100, itl_p99=10), 2),
    ):
        targets = Targets(p2=promised)
        outcome = simulate(jobs, policy_of("default", TokenCap(512, 16)), ENGINE, Fixed(), targets)
        assert outcome.classes["p2"].result(2 * 10**9)["goodput"] == good / 2


def test_a_single_long_gap_misses_the_target() -> None:
    jobs = [at(0, output=10), at(15, output=1)]
    outcome = simulate(jobs, policy_of("default", CAP), ENGINE, Fixed(), Targets(p2=ClassTargets(itl_p99=10.5)))
    assert sorted(set(outcome.classes["p2"].itl_ms)) == [10.0, 11.0]
    assert outcome.classes["p2"].result(10**9)["goodput"] == 1


def test_classes_have_figures_of_their_own() -> None:
    jobs = [at(0), at(0, service=ServiceClass.P0)]
    outcome = run(jobs)
    assert sorted(outcome.classes) == ["p0", "p2"]
    assert all(len(figures.ttft_ms) == 1 for figures in outcome.classes.values())


def test_each_class_has_its_own_targets() -> None:
    targets = Targets(p0=ClassTargets(ttft_p99=1), p2=ClassTargets(ttft_p99=1000))
    jobs = [at(0), at(500, service=ServiceClass.P0)]
    classes = simulate(jobs, policy_of("default", CAP), ENGINE, Fixed(), targets).classes
    assert (classes["p0"].good, classes["p2"].good) == (0, 1)


def test_the_hosts_work_delays_a_lone_step_and_hides_behind_others() -> None:
    engine = replace(ENGINE, host_ms=2.0)
    figures = simulate([at(0, output=20)], policy_of("default", CAP), engine, Fixed()).classes["p2"]
    assert figures.ttft_ms == [2.0 + 11.0]
    # Planned while the step before runs, so only its own length is seen.
    assert figures.itl_ms == [10.0] * 19
    alone = replace(engine, in_flight=1)
    figures = simulate([at(0, output=20)], policy_of("default", CAP), alone, Fixed()).classes["p2"]
    assert figures.itl_ms == [12.0] * 19


def test_the_real_clock_goes_on_afterwards() -> None:
    before = now_ns()
    run([at(10**6)])
    assert before <= now_ns() < before + 10**6 * NS_PER_MS


def test_garbage_does_not_grow_while_the_collector_is_off() -> None:
    def left(requests: int) -> int:
        gc.collect()
        run([at(0, 600, 3, (number % 5, number)) for number in range(requests)], kv_blocks=60)
        assert gc.isenabled()
        return gc.collect()

    # What the cache still holds at the end is all that is left.
    assert abs(left(40) - left(200)) < 40


def test_a_policy_that_plans_nothing_is_found_out() -> None:
    class Idle(Policy):
        def build(self, *args: Any, **options: Any) -> Scheduler:
            scheduler = super().build(*args, **options)
            scheduler.plan = lambda: None  # type: ignore[method-assign]
            return scheduler

    with pytest.raises(RuntimeError, match="1 requests are left"):
        simulate([at(0)], Idle("idle", CAP), ENGINE, Fixed())


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_serves_everything_the_same_each_time(name: str) -> None:
    jobs = [at(7 * number, 16 + 37 * number % 300, 1 + number % 20) for number in range(60)]
    first, second = run(jobs, policy=name), run(jobs, policy=name)
    assert first.output_tokens == sum(job.output for job in jobs)
    assert len(first.classes["p2"].e2e_ms) == 60
    assert first.classes["p2"].result(1) == second.classes["p2"].result(1)


def mixed(loads: list[StepLoad]) -> list[StepLoad]:
    return [load for load in loads if load.decode_rows and load.prefill_tokens]


def test_fcfs_fills_a_step_to_its_total_decode_rows_as_padded_included() -> None:
    time = Fixed()
    run([at(0, 16, 40), at(15, 900, 1), at(15, 16, 1)], time, policy="fcfs-512")
    assert [load.decode_rows + load.prefill_tokens for load in mixed(time.loads)] == [1 + 508, 1 + 900 - 508 + 16]


def test_fcfs_lets_nobody_overtake() -> None:
    # The short prompt came last: by the scheduler's own rule it shares the step, first come first served it waits.
    jobs = [at(0, 16, 40), at(15, 2500, 1, group="long"), at(16, 16, 1, group="short")]
    ours, first_come = (
        run(jobs, policy=name, kv_blocks=300, max_model_len=3000).classes for name in ("default", "fcfs-512")
    )
    assert ours["p2 short"].ttft_ms[0] < ours["p2 long"].ttft_ms[0] / 2
    # Both end in the fifth step that computes prompts.
    assert first_come["p2 short"].ttft_ms[0] + 1 == first_come["p2 long"].ttft_ms[0]


def test_fcfs_waits_for_a_request_that_does_not_fit() -> None:
    # 40 of 50 blocks are taken: the long one does not fit until the first has ended, the short one would.
    jobs = [at(0, 600, 20), at(1, 400, 1, group="long"), at(2, 16, 1, group="short")]
    overtaken, in_order = (run(jobs, kv_blocks=50, policy=name).classes for name in ("default", "fcfs-2048"))
    assert overtaken["p2 short"].ttft_ms[0] < 70 < 200 < overtaken["p2 long"].ttft_ms[0]
    assert 200 < in_order["p2 short"].ttft_ms[0] < in_order["p2 long"].ttft_ms[0]


def test_prefill_first_never_mixes_and_lets_decode_rows_wait() -> None:
    time = Fixed()
    outcome = run([at(0, 16, 10), at(15, 900, 1)], time, policy="prefill-first")
    assert not mixed(time.loads)
    assert max(outcome.classes["p2"].itl_ms) == 10 + 10 + 900 / 16


def test_policies_differ_in_no_more_than_they_say() -> None:
    assert policy_of("default", BUDGET).budget is BUDGET
    with pytest.raises(ConfigError, match="'fastest' is no policy: known are default, fcfs-512"):
        policy_of("fastest", BUDGET)


def test_prompts_are_the_blocks_tokens() -> None:
    prompt = array("I", Job(0, 700, 1, (3, 5)).prompt(9))
    assert list(prompt) == [4] * 512 + [6] * 188
    assert set(array("I", Job(0, 7, 1).prompt(9))) == {10}


def test_a_watch_sees_every_step_when_it_is_launched() -> None:
    seen: list[tuple[int, int, int]] = []

    def watch(planned: PlannedStep, began_ns: int, ends_ns: int) -> None:
        seen.append((planned.plan.step_id, began_ns, ends_ns))

    outcome = simulate([at(5, output=3)], policy_of("default", CAP), ENGINE, Fixed(), watch=watch)
    ms = NS_PER_MS
    assert seen == [(0, 5 * ms, 16 * ms), (1, 16 * ms, 26 * ms), (2, 26 * ms, 36 * ms)]
    assert outcome.steps == 3


def test_who_is_turned_away_is_counted_and_never_served() -> None:
    jobs = [at(0, output=100) for _ in range(4)] + [at(10 + number, output=10) for number in range(6)]
    targets = Targets(p2=ClassTargets(max_waiting=2))
    all_in = simulate(jobs, policy_of("default", CAP), ENGINE, Fixed(), targets)
    assert not all_in.refused
    few = simulate(jobs, policy_of("default", CAP), ENGINE, Fixed(), targets, admission=True)
    assert dict(few.refused) == {"overloaded: queue of p2": 4}
    assert len(few.classes["p2"].e2e_ms) == 6
    assert few.classes["p2"].start_ms[-1] <= all_in.classes["p2"].start_ms[-1]


def test_a_window_holds_in_virtual_time() -> None:
    jobs = [at(0, output=1), at(12, output=1), at(100, output=1)]
    outcome = simulate(jobs, policy_of("default", CAP), ENGINE, Fixed(), window=StaticWindow(20))
    # The first two share a step of 12 ms from 20 on.
    assert outcome.classes["p2"].ttft_ms == [20.0, 31.0, 32.0]
    assert outcome.steps == 2
