"""Rope frequencies against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from firsttoken.checkpoint.model_config import RopeConfig
from firsttoken.core.errors import CheckpointError
from firsttoken.models.rope import rope_table

CASES = {
    "llama-3.1": RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_position=8192),
    "llama-3.2": RopeConfig(kind="llama3", theta=5e5, factor=32.0, original_max_position=8192),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "yarn": RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_position=32768),
    "yarn betas": RopeConfig(kind="yarn", factor=8.0, original_max_position=4096, beta_fast=20.0, beta_slow=2.0),
    "yarn not truncated": RopeConfig(kind="yarn", factor=8.0, original_max_position=4096, truncate=False),
    "yarn mscale": RopeConfig(kind="yarn", factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=0.7),
    "yarn stated factor": RopeConfig(kind="yarn", factor=8.0, original_max_position=4096, attention_factor=1.5),
    "yarn degenerate ramp": RopeConfig(kind="yarn", factor=8.0, original_max_position=4, beta_fast=1.0),
}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rope", CASES.values(), ids=CASES)
def test_equals_transformers(rope: RopeConfig, head_dim: int) -> None:
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.kind != "linear":
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {name: getattr(rope, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        parameters |= {name: value for name, value in optional.items() if value is not None}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=parameters, max_position_embeddings=131072
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    table = rope_table(rope, head_dim, 131072)
    assert torch.allclose(table.inv_freq, expected, rtol=1e-5, atol=0)
    assert table.scaling == pytest.approx(scaling, rel=1e-6)


def test_default_is_the_papers() -> None:
    table = rope_table(RopeConfig(theta=10000.0), 4, 100)
    assert table.inv_freq.tolist() == pytest.approx([1.0, 0.01])
    assert table.scaling == 1.0


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="unknown rope kind 'longrope': known are default, linear, llama3, yarn"):
        rope_table(RopeConfig(kind="longrope"), 64, 100)
