"""From a configuration to what its layers' attention needs."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.kernels.paged_attention import AttentionSpec
from firsttoken.models.rope import rope_table


def attention_specs(config: ModelConfig, device: str = "cpu") -> tuple[AttentionSpec, ...]:
    """All specs of the model: one, or two where layers with a window have a rope of their own (then theirs is last)."""
    ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
    return tuple(_spec(config, rope, device) for rope in ropes)


def spec_of_layer(config: ModelConfig, specs: tuple[AttentionSpec, ...], layer: int) -> AttentionSpec:
    """Which of `attention_specs` the layer has."""
    return specs[0] if config.window(layer) is None else specs[-1]


def _spec(config: ModelConfig, rope: RopeConfig | None, device: str) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=None if rope is None else rope_table(rope, config.head_dim, config.max_position, device),
        alibi_slopes=alibi_slopes(config.num_heads).to(device) if config.alibi else None,
        softcap=config.attention_softcap,
        scale_override=config.attention_scale,
    )


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes float32 ``[num_heads]`` by the rule of Press et al., 2021, "Train Short, Test Long".

    For a power of two, ``2 ** (-8 i / n)`` for head ``i`` from 1. Between two powers, the smaller one's slopes and
    then every other one of the larger's.
    """
    power = 1 << (num_heads.bit_length() - 1)
    extra = _geometric(2 * power)[::2][: num_heads - power]
    return torch.cat((_geometric(power), extra))


def _geometric(count: int) -> Tensor:
    return torch.exp2(-8.0 * torch.arange(1, count + 1) / count)
