"""Learning step times while steps run: from a wrong prior, among outliers, on a device that changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.scheduler.step_learner import ERROR_WINDOW, LearningStepTime, StepErrors, StepKind, kind_of
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad

KNOTS = ((1, 3.8), (64, 4.6), (512, 11.0), (8192, 160.0))
TRUE = FittedStepTime(GRAPH_SIZES, KNOTS, 3e-5, 1.4e-6, 5e-4)
# Weights are read twice as fast as on the true device, arithmetic is slower, KV three times as slow.
WRONG = FittedStepTime(GRAPH_SIZES, tuple((rows, 1.9 + 1.5 * (ms - 3.8)) for rows, ms in KNOTS), 9e-5, 0.5e-6, 2e-4)
LOADS = {
    StepKind.DECODE: StepLoad(16, 30_000, 0, 0),
    StepKind.MIXED: StepLoad(16, 30_000, 0, 0).with_chunk(2000, 400),
    StepKind.PREFILL: StepLoad(0, 0, 0, 0).with_chunk(2000, 1000),
}


def loads(seed: int, *kinds: StepKind) -> Iterator[StepLoad]:
    """Steps of these kinds, of any size, for ever."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(kinds)
        rows = 0 if kind is StepKind.PREFILL else rng.choice((1, 3, 8, 20, 40, 64))
        load = StepLoad(rows, rows * rng.randrange(1, 8000), 0, 0)
        yield load if kind is StepKind.DECODE else load.with_chunk(rng.randrange(8000), rng.randrange(1, 2000))


def worst(model: LearningStepTime, truth: FittedStepTime, *kinds: StepKind) -> float:
    """The 90th percentile of the error of 100 steps."""
    steps = [load for load, _ in zip(loads(99, *kinds), range(100), strict=False)]
    return sorted(abs(model.ms(load) / truth.ms(load) - 1) for load in steps)[90]


def test_the_first_predictions_are_the_priors():
    model = LearningStepTime(WRONG)
    for load in LOADS.values():
        assert model.ms(load) == pytest.approx(WRONG.ms(load))
    assert model.ms(StepLoad(0, 0, 0, 0)) == 0
    assert model.errors(StepKind.DECODE) == StepErrors(0, 0.0, 0.0)


@pytest.mark.parametrize("kind", list(StepKind))
def test_a_wrong_prior_is_forgotten_within_a_hundred_steps(kind: StepKind):
    model = LearningStepTime(WRONG)
    assert worst(model, TRUE, kind) > 0.2
    rng = random.Random(5)
    for load, _ in zip(loads(1, kind), range(100), strict=False):
        assert kind_of(load) is kind
        model.learn(load, TRUE.ms(load) * rng.gauss(1, 0.02))
    assert worst(model, TRUE, kind) < 0.05


def test_steps_that_take_far_longer_now_and_then_do_not_mislead():
    model, rng = LearningStepTime(WRONG), random.Random(5)
    for load, number in zip(loads(1, *StepKind), range(1500), strict=False):
        late = (number % 3 == 0 and number < 9) or rng.random() < 0.05
        model.learn(load, TRUE.ms(load) * (rng.uniform(3, 50) if late else rng.gauss(1, 0.02)))
    assert worst(model, TRUE, *StepKind) < 0.06


def test_a_device_that_becomes_slower_is_believed():
    model = LearningStepTime(TRUE)
    for factor, steps in ((1.0, 3000), (1.6, 200)):
        for load, _ in zip(loads(int(factor), StepKind.DECODE), range(steps), strict=False):
            model.learn(load, factor * TRUE.ms(load))
    assert model.ms(LOADS[StepKind.DECODE]) == pytest.approx(1.6 * TRUE.ms(LOADS[StepKind.DECODE]), rel=0.08)


def test_a_long_run_of_one_step_does_not_unlearn_the_others():
    model = LearningStepTime(TRUE)
    same, rng = LOADS[StepKind.DECODE], random.Random(2)
    for _ in range(30_000):
        model.learn(same, TRUE.ms(same) * rng.gauss(1, 0.03))
    model.learn(StepLoad(64, 500_000, 0, 0), 1.2 * TRUE.ms(StepLoad(64, 500_000, 0, 0)))
    for load in (same, StepLoad(1, 100, 0, 0), StepLoad(64, 100_000, 0, 0)):
        assert model.ms(load) == pytest.approx(TRUE.ms(load), rel=0.25)


def test_kinds_learn_apart_but_one_that_is_new_begins_as_another_does():
    model = LearningStepTime(TRUE)
    for load, _ in zip(loads(1, StepKind.DECODE), range(200), strict=False):
        model.learn(load, 2 * TRUE.ms(load))
    assert model.ms(LOADS[StepKind.PREFILL]) > 1.2 * TRUE.ms(LOADS[StepKind.PREFILL]), "what decode rows have shown"
    for load, _ in zip(loads(1, StepKind.PREFILL), range(200), strict=False):
        model.learn(load, TRUE.ms(load))
    assert model.ms(LOADS[StepKind.PREFILL]) == pytest.approx(TRUE.ms(LOADS[StepKind.PREFILL]), rel=0.02)
    assert model.ms(LOADS[StepKind.DECODE]) == pytest.approx(2 * TRUE.ms(LOADS[StepKind.DECODE]), rel=0.02)


def test_a_mixed_step_takes_no_less_than_its_decode_rows_alone():
    model = LearningStepTime(TRUE)
    for load, _ in zip(loads(1, StepKind.MIXED, StepKind.DECODE), range(300), strict=False):
        model.learn(load, TRUE.ms(load) * (0.1 if load.prefill_tokens else 1))
    for load in (LOADS[StepKind.DECODE], StepLoad(64, 400_000, 0, 0)):
        assert model.ms(load.with_chunk(0, 5)) >= model.ms(load)


def test_errors_are_those_of_the_last_steps_of_a_kind_before_they_were_learned_from():
    model, load = LearningStepTime(TRUE), LOADS[StepKind.MIXED]
    model.learn(load, TRUE.ms(load) / 2)
    assert model.errors(StepKind.MIXED) == pytest.approx(StepErrors(1, 1.0, 1.0))
    assert model.errors(StepKind.DECODE).steps == 0
    for _ in range(ERROR_WINDOW):
        model.learn(load, model.ms(load) / 1.1)
    steps, median, p90 = model.errors(StepKind.MIXED)
    assert steps == ERROR_WINDOW, "the first has left"
    assert (median, p90) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("ms", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_not_learned(ms: float):
    model = LearningStepTime(TRUE)
    model.learn(LOADS[StepKind.DECODE], ms)
    assert model.errors(StepKind.DECODE).steps == 0
    assert model.ms(LOADS[StepKind.DECODE]) == pytest.approx(TRUE.ms(LOADS[StepKind.DECODE]))


def test_a_prior_by_which_steps_take_no_time_is_refused():
    with pytest.raises(ValueError, match=r"takes 0\.0 ms"):
        LearningStepTime(FittedStepTime(GRAPH_SIZES, ((1, 0.0), (64, 1.0)), 0.0, 0.0, 0.0))


ANY_LOAD = st.builds(
    StepLoad,
    st.integers(0, 300),
    st.integers(0, 10**6),
    st.integers(0, 9000),
    st.integers(0, 10**8),
    st.integers(0, 10**5),
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(ANY_LOAD, st.floats(1e-3, 1e5)), max_size=30),
    st.lists(st.tuples(ANY_LOAD, st.integers(0, 4), st.integers(1, 3000)), min_size=1, max_size=20),
)
def test_whatever_was_learned_more_of_anything_never_takes_less(
    learned: list[tuple[StepLoad, float]], asked: list[tuple[StepLoad, int, int]]
):
    model = LearningStepTime(TRUE)
    for load, ms in learned:
        model.learn(load, ms)
    for load, component, more in asked:
        larger = list(load)
        larger[component] += more
        assert 0 <= model.ms(load) <= model.ms(StepLoad(*larger)) * (1 + 1e-12)
        assert model.ms(load) > 0 or not (load.decode_rows or load.prefill_tokens)
