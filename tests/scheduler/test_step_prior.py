"""Step times by a data sheet, beside those measured."""

from __future__ import annotations

import pytest

from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.devices.cuda import POLICY
from firsttoken.scheduler.step_prior import ModelCost, Roof, rough_step_time
from firsttoken.scheduler.step_time import StepLoad, load_of
from firsttoken.simulate.gpu import packaged_table

# Llama-3.1-8B in bfloat16.
COST = ModelCost(weight_bytes=15.0e9, parameters=6.98e9, kv_bytes=131_072, layers=32, attention_width=4096)


def test_an_h200s_steps_are_foreseen_to_a_fifth_before_any_was_run():
    rough = rough_step_time(POLICY.roof, COST, GRAPH_SIZES)
    steps = packaged_table("h200", "llama-3.1-8b").steps
    errors = sorted(
        abs(
            rough.ms(load_of(step.__struct_fields__ and {n: getattr(step, n) for n in step.__struct_fields__}))
            / step.ms
            - 1
        )
        for step in steps
    )
    assert errors[len(errors) // 2] < 0.15
    assert errors[len(errors) * 9 // 10] < 0.35


def test_half_the_bandwidth_is_twice_the_time_of_a_decode_step():
    slow, fast = (rough_step_time(Roof(gb_s, 1000), COST, GRAPH_SIZES) for gb_s in (1000, 2000))
    rows = StepLoad(1, 100_000, 0, 0)
    assert slow.ms(rows) == pytest.approx(2 * fast.ms(rows), rel=0.01)


def test_half_the_arithmetic_is_twice_the_time_of_a_long_prompt():
    slow, fast = (rough_step_time(Roof(4000, tflops), COST, GRAPH_SIZES) for tflops in (200, 400))
    prompt = StepLoad(0, 0, 0, 0).with_chunk(0, 8192)
    assert slow.ms(prompt) == pytest.approx(2 * fast.ms(prompt), rel=0.01)
