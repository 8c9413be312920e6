"""How many prompt tokens a step is given: by a cap, by sizes, by time."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.core.step_sizes import GRAPH_SIZES, StepSizes
from firsttoken.scheduler import StepLoad, TimeBudget, TokenCap
from firsttoken.scheduler.budget import EXPLORE_EVERY, GRAIN
from firsttoken.scheduler.step_time import FittedStepTime

# 4 ms up to 64 token rows, then 2 ms for each 100; 0.1 ms for 1,000 tokens of context.
TIME = FittedStepTime(GRAPH_SIZES, ((64, 4.0), (164, 6.0)), 1e-4, 1e-6, 1e-4)


def load(rows: int, context: int = 0, reach: int = 0) -> StepLoad:
    return StepLoad(rows, context, 0, 0, reach)


def timed(**fields: Any) -> TimeBudget:
    given = {
        "time": TIME,
        "stretch": 3.0,
        "added": 100.0,
        "crowded": 5.0,
        "alone": ((0, 4096), (2, 2048)),
        "sizes": GRAPH_SIZES,
    }
    return TimeBudget(**given | fields)


def by_time(gap_ms: float, load: StepLoad, waiting: int = 0, **fields: Any) -> int:
    return timed(**fields).prefill_tokens(load, waiting, gap_ms)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 100), (1, 20), (2, 25), (10, 65), (17, 100), (500, 100)])
def test_a_cap_grows_with_the_decode_rows_up_to_the_one_alone(rows: int, tokens: int) -> None:
    assert TokenCap(alone=100, mixed=20, per_row=5).prefill_tokens(load(rows), waiting=3) == tokens


def test_a_cap_beside_decodes_that_is_above_the_one_alone_is_kept() -> None:
    assert TokenCap(alone=10, mixed=20).prefill_tokens(load(4), waiting=0) == 20
    with pytest.raises(ConfigError):
        TokenCap(alone=10, mixed=20, per_row=-1)


def test_the_levels_of_a_step_alone_begin_with_nobody_waiting_and_rise() -> None:
    for levels in ((), ((1, 5),), ((0, 5), (3, 9), (2, 7))):
        with pytest.raises(ConfigError, match="levels of alone must begin with 0"):
            timed(alone=levels)


def test_a_step_stays_within_the_gap_and_fills_the_size_that_it_is_padded_to():
    for gap_ms in (6.0, 10.0, 15.0, 30.0):
        for rows, context, reach in ((1, 500, 0), (16, 20_000, 3000), (17, 0, 0), (64, 30_000, 0)):
            given = load(rows, context, reach)
            tokens = by_time(gap_ms, given)
            total = GRAPH_SIZES.padded(rows, tokens)
            next_total = GRAPH_SIZES.padded(rows, tokens + 1)
            assert next_total > total, "one more token would be padded to the next size"
            assert TIME.ms(given.with_chunk(reach, tokens + next_total - total)) > gap_ms, "which does not fit"
            assert tokens <= 64 or TIME.ms(given.with_chunk(reach, tokens)) <= gap_ms


def test_a_step_gets_less_beside_longer_contexts_and_behind_longer_prompts():
    assert by_time(13.5, load(16, 1000)) == 512 - 16
    assert by_time(13.5, load(16, 30_000)) == 384 - 16
    assert by_time(13.5, load(16, 1000, reach=20_000)) == 256 - 16


def test_without_a_promise_a_step_is_stretched_and_more_so_in_a_crowd():
    rows = load(16, 10_000)  # 5 ms alone
    assert timed().prefill_tokens(rows, 0) == by_time(15.0, rows)
    assert timed().prefill_tokens(rows, 16) == by_time(15.0, rows), "as many decode as wait"
    assert timed().prefill_tokens(rows, 17) == by_time(25.0, rows) > by_time(15.0, rows)
    few = load(2, 1000)
    assert timed().prefill_tokens(few, 15) == timed().prefill_tokens(few, 0) < timed().prefill_tokens(few, 16)
    assert timed().prefill_tokens(rows._replace(prefill_reach=9000), 0) == by_time(
        15.0, rows._replace(prefill_reach=9000)
    )


def test_a_prompt_goes_on_when_the_decode_rows_alone_take_longer_than_the_gap():
    assert by_time(1.0, load(16, 10**6)) == 64 - 16
    assert by_time(1.0, load(32, 10**6)) == 64 - 32
    assert by_time(1.0, load(32, 10**6), least=33) == 128 - 32
    assert by_time(1.0, load(30_000)) == 32, "more rows than any size"


def test_a_device_that_does_not_pad_is_given_what_fits_in_steps_of_few_sizes():
    time = FittedStepTime(StepSizes(), ((64, 4.0), (164, 6.0)), 0.0, 0.0, 0.0)
    assert by_time(6.0, load(10), time=time, sizes=StepSizes()) == 160 - 10, "and not 164, which would fit"
    assert by_time(6.0, load(163), time=time, sizes=StepSizes()) == 32
    assert by_time(1e9, load(10), time=time, sizes=StepSizes()) == 4096


def test_the_more_rows_the_less_each_is_stretched():
    budget = timed(added=2.0)  # 8 ms: a step of one row takes 4
    assert budget.prefill_tokens(load(4), 0) == by_time(12.0, load(4)), "4 ms alone, three times that"
    rows = load(16, 40_000)  # 8 ms alone
    assert budget.prefill_tokens(rows, 0) == by_time(16.0, rows) < by_time(24.0, rows)
    assert budget.prefill_tokens(rows, 17) == by_time(40.0, rows), "a crowd outweighs them"


@pytest.mark.parametrize("sizes", [GRAPH_SIZES, StepSizes()])
def test_now_and_then_a_step_is_larger_than_what_is_thought_to_fit(sizes: StepSizes):
    """On a model that thinks nothing fits, or a wrong one would never be shown to be."""
    budget = timed(sizes=sizes)
    given = [budget.prefill_tokens(load(16, 1000), 0, 0.1) for _ in range(10 * EXPLORE_EVERY)]
    usual = given[0]
    tried = [tokens for tokens in given if tokens != usual]
    assert len(tried) == 10
    assert min(tried) > usual


def test_a_step_that_nobody_waits_beside_has_its_own_cap():
    budget = timed()
    assert [budget.prefill_tokens(load(0), waiting) for waiting in (0, 1, 2, 9)] == [4096, 4096, 2048, 2048]
    assert budget.most == 4096
    assert by_time(1e9, load(4)) == 2048 - 4, "and of 4,096 fewer are computed in a millisecond"


def test_the_callers_caps_replace_the_time():
    assert timed().limited(100, None).prefill_tokens(load(0), 0) == 100
    assert timed().limited(None, 20) == TokenCap(4096, 20)
    assert timed().limited(None, None) == timed()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"stretch": 1.0}, "more than its decode rows alone"),
        ({"stretch": float("nan")}, "more than its decode rows"),
        ({"crowded": 2.0}, "in a crowd no less"),
        ({"added": 0.0}, "add some time"),
        ({"least": 0}, "least"),
        ({"alone": ()}, "alone"),
    ],
)
def test_a_budget_of_no_time_is_refused(wrong: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        timed(**wrong)


class Told:
    """A budget that remembers what it was asked."""

    most = 8

    def __init__(self) -> None:
        self.asked: list[tuple[StepLoad, int]] = []

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        self.asked.append((load, waiting))
        return self.most


def test_the_scheduler_tells_what_the_decode_rows_attend_to_and_how_far_prompts_are(world: Any):
    w = world(blocks=32, slots=4, alone=8, mixed=8)
    told = w.scheduler.budget = Told()
    w.add([1, 2, 3, 4, 5], 6)
    w.step()
    assert told.asked.pop() == (StepLoad(0, 0, 0, 0), 1)
    w.step()
    assert not told.asked, "with decode rows only there is nothing to ask"
    w.add([9] * 20, 2)
    w.step()
    assert told.asked.pop() == (StepLoad(1, 7, 0, 0), 1)
    planned = w.step()
    assert told.asked.pop() == (StepLoad(1, 8, 0, 0, 8), 0)
    assert StepLoad.of(planned.plan) == StepLoad(1, 8, 0, 0).with_chunk(8, 8)
    w.drain()


class Promised:
    """The same gap for everybody."""

    most = 40

    def __init__(self, budget: TimeBudget, gap_ms: float) -> None:
        self.budget = budget
        self.gap_ms = gap_ms

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        return self.budget.prefill_tokens(load, waiting, self.gap_ms)


def test_steps_of_the_scheduler_stay_within_the_gap_while_a_long_prompt_is_computed(world: Any):
    time = FittedStepTime(StepSizes(), ((1, 1.0), (11, 2.0)), 0.002, 0.001, 0.0)
    w = world(blocks=200, slots=4, alone=40, mixed=40, max_model_len=500)
    w.scheduler.budget = Promised(TimeBudget(time, 3.0, 9.0, 3.0, ((0, 40),), StepSizes(), least=1), 4.5)
    for length in (3, 5, 4):
        w.add([length] * length, 30)
    w.step()
    w.add([2] * 400, 3)
    loads = [StepLoad.of(w.step().plan) for _ in range(8)]
    assert all(each.decode_rows == 3 and each.prefill_tokens > 3 for each in loads)
    assert all(time.ms(each) <= 4.5 for each in loads), "whatever the context by then"
    assert all(time.ms(each.with_chunk(each.prefill_reach, GRAIN)) > 4.5 for each in loads), "as much as fits"
    assert loads[0].prefill_tokens > loads[-1].prefill_tokens, "later chunks attend to more"
    w.drain()
