"""Weights that are rounded on load, through the executor: few rows, many, and what is refused."""

from __future__ import annotations

import pytest
import torch

from firsttoken.core.errors import ConfigError
from firsttoken.core.plan import RowWork
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.models.fused import FusedDecoder
from tests.executor.test_graph_executor import Driver, Reference, make_executor, make_weights, prompt

# How far rounding moves the logits of tiny random weights, as a share of their size.
MOVED = {"int4": 0.35, "fp8": 0.08}
SMALL = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 48}


def executor_of(format: str, architecture: str = "LlamaForCausalLM", **changes: object) -> tuple[GraphExecutor, Driver]:
    checkpoint = make_weights(architecture, **{**SMALL, **changes})
    executor = make_executor(checkpoint, quantization=format, step_tokens=80)
    return executor, Driver(executor)


def apart(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values.float().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_rounded_weights_move_the_logits_little(format: str) -> None:
    checkpoint = make_weights("LlamaForCausalLM", **SMALL)
    executor, driver = executor_of(format)
    model = executor._model
    assert isinstance(model, FusedDecoder)
    layer = model.layers[0]
    assert all(isinstance(p.weight, PackedWeight) and p.weight.format == format for p in layer.projections)
    assert isinstance(model.head.weight, PackedWeight)
    assert model.head.weight.format == "fp8"
    reference = Reference(checkpoint)
    row, start = driver.start(0, [token % 48 for token in prompt(5, 1)])
    chosen = driver.step([RowWork(0, 0, 5, True)], [start])
    # A prompt's rows are rounded too, as those of more than 8 requests are.
    assert driver.logits is not None
    assert apart(driver.logits[0], reference.after(row.tokens)) < MOVED[format] + 0.1
    row.tokens += chosen
    driver.step([RowWork(0, 5, 1, True)])
    assert apart(driver.logits[0], reference.after(row.tokens)) < MOVED[format] + 0.05  # of the KV that it reads
    many, start = driver.start(1, row.tokens + [7] * 62)
    driver.step([RowWork(1, 0, len(many.tokens), True)], [start])
    assert apart(driver.logits[0], reference.after(many.tokens)) < MOVED[format] + 0.1


def test_a_size_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.down_proj is 64 x 72: int4 weights need columns"):
        executor_of("int4", intermediate_size=72)


def test_a_family_without_fused_layers_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quantization 'int4' is not supported for Gemma3ForCausalLM"):
        executor_of("int4", "Gemma3ForCausalLM")
