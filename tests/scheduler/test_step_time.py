"""The model of step times: what a load is, what a fit finds again, and how well it predicts steps it has not seen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.plan import RowWork, StepPlan
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.executor.graphs.profiles import ShapeTable
from firsttoken.scheduler.least_squares import nonnegative_least_squares
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad, chunk_pairs, fit_steps, load_of

MEASURED = Path(__file__).parents[2] / "benchmarks/results/h200/steps.json"
TRUE = FittedStepTime(GRAPH_SIZES, ((1, 4.0), (64, 5.0), (512, 11.0)), 3e-5, 1.3e-6, 5e-4)


def measured() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))["steps"]
    return steps


def row(decode_rows: int, context: int, tokens: int, start: int) -> dict[str, int]:
    return {"decode_rows": decode_rows, "context": context, "prefill_tokens": tokens, "prefill_start": start}


def test_the_load_of_a_plan_counts_rows_context_tokens_and_pairs():
    work = [RowWork(0, 9, 1, True), RowWork(1, 0, 1, True), RowWork(2, 4, 3, True), RowWork(3, 7, 1, False)]
    pairs = (5 + 6 + 7) + 8  # each query with all up to itself
    assert StepLoad.of(StepPlan(0, work)) == StepLoad(2, 10 + 1, 3 + 1, pairs, 8)
    assert StepLoad(2, 11, 0, 0).with_chunk(4, 3).with_chunk(7, 1) == StepLoad.of(StepPlan(0, work))


def test_the_pairs_of_a_chunk_do_not_depend_on_how_it_is_cut():
    assert chunk_pairs(0, 100) == chunk_pairs(0, 64) + chunk_pairs(64, 36) == sum(range(1, 101))


def test_a_fit_finds_the_model_that_made_the_steps():
    cells = [row(rows, context, 0, 0) for rows in (1, 8, 64) for context in (128, 2048, 8192)]
    cells += [row(0, 0, tokens, start) for tokens in (16, 64, 128, 512, 1024) for start in (0, 2048, 8192)]
    found = fit_steps([{**cell, "ms": TRUE.ms(load_of(cell))} for cell in cells])
    for load in (
        StepLoad(8, 5000, 0, 0),
        StepLoad(4, 9000, 500, 0).with_chunk(0, 500),
        StepLoad(0, 0, 0, 0).with_chunk(900, 40),
    ):
        assert found.ms(load) == pytest.approx(TRUE.ms(load), rel=0.02)


def test_a_fit_needs_steps():
    with pytest.raises(ValueError, match="at least one measured step"):
        fit_steps([])
    with pytest.raises(ValueError, match=r"took 0\.0 ms"):
        fit_steps([{**row(1, 9, 0, 0), "ms": 4.0}, {**row(1, 9, 0, 0), "ms": 0}])
    assert fit_steps([{**row(1, 9, 0, 0), "ms": 4.0}]).ms(StepLoad(1, 10, 0, 0)) == pytest.approx(4.0)


def test_steps_of_an_h200_are_predicted_that_the_fit_has_not_seen():
    steps = measured()
    random.Random(1).shuffle(steps)
    cut = len(steps) * 3 // 4
    model = fit_steps(steps[:cut])
    for decode_only in (True, False):
        errors = sorted(
            abs(model.ms(load_of(step)) / step["ms"] - 1)
            for step in steps[cut:]
            if (step["kind"] == "decode") is decode_only and step["kind"] != "prefill"
        )
        assert len(errors) > 10
        assert errors[len(errors) // 2] < 0.08
        assert errors[len(errors) * 9 // 10] < 0.20


MODEL = fit_steps(measured())


@given(
    st.builds(
        StepLoad,
        st.integers(0, 300),
        st.integers(0, 10**6),
        st.integers(0, 9000),
        st.integers(0, 10**8),
        st.integers(0, 10**5),
    ),
    st.integers(0, 4),
    st.integers(1, 3000),
)
def test_more_of_anything_never_takes_less(load: StepLoad, component: int, more: int):
    larger = list(load)
    larger[component] += more
    assert 0 < MODEL.ms(load) <= MODEL.ms(StepLoad(*larger))


def test_a_short_chunk_behind_a_long_prefix_takes_as_long_as_the_walk_along_it():
    steps = [step for step in measured() if step["kind"] == "prefill" and step["prefill_tokens"] <= 128]
    assert {step["prefill_start"] for step in steps} == {0, 512, 2048, 4096, 8192}
    for step in steps:
        assert MODEL.ms(load_of(step)) == pytest.approx(step["ms"], rel=0.12)


def test_padding_is_what_a_step_pays_for():
    assert MODEL.ms(StepLoad(5, 0, 0, 0)) == MODEL.ms(StepLoad(8, 0, 0, 0))
    assert MODEL.ms(StepLoad(4, 0, 508, 0)) < 0.85 * MODEL.ms(StepLoad(4, 0, 509, 0)), "512 token rows, then 640"


def test_sizes_pad_as_the_shapes_do():
    table = ShapeTable(256, 8192, tile_rows=128)
    for rows in (0, 1, 3, 16, 17, 65, 200):
        for tokens in (0, 1, 60, 448, 500, 1023, 2048, 5000):
            if rows + tokens:
                assert GRAPH_SIZES.padded(rows, tokens) == table.shape(rows, [tokens] if tokens else [], 1).tokens


def test_no_coefficient_is_negative():
    found = nonnegative_least_squares([[1, 0, 0], [1, 1, 0], [1, 2, 0]], [3.0, 2.0, 1.0])
    assert found == pytest.approx([2.0, 0.0, 0.0])
    assert nonnegative_least_squares([[1, 0], [1, 1], [1, 2]], [1.0, 3.0, 5.0]) == pytest.approx([1.0, 2.0])
