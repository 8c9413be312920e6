"""Qwen3 (dense): a Llama with RMSNorm on each query and key head before RoPE."""

from __future__ import annotations

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.models.blocks import (
    DecoderLayer,
    LayerBuilder,
    Shape,
    attention_tensors,
    mlp_tensors,
    norm_tensors,
    qk_norm_tensors,
)
from firsttoken.models.registry import Family, register


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    return norm_tensors(config) | attention_tensors(config) | qk_norm_tensors(config) | mlp_tensors(config)


def build_layer(builder: LayerBuilder) -> DecoderLayer:
    return builder.layer(qk_norm=True)


register(Family(layer_tensors, build_layer, fused=True), "Qwen3ForCausalLM")
