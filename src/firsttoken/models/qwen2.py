"""Qwen2 and Qwen2.5: a Llama whose q, k and v projections always have biases."""

from __future__ import annotations

import msgspec

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError
from firsttoken.models.blocks import DecoderLayer, LayerBuilder, Shape, attention_tensors, mlp_tensors, norm_tensors
from firsttoken.models.registry import Family, register


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    biased = msgspec.structs.replace(config, attention_bias=True, output_bias=False)
    return norm_tensors(config) | attention_tensors(biased) | mlp_tensors(config)


def build_layer(builder: LayerBuilder) -> DecoderLayer:
    if not builder.config.attention_bias:
        raise CheckpointError("Qwen2 has biases on q, k and v; the configuration says false", field="attention_bias")
    return builder.layer()


register(Family(layer_tensors, build_layer, fused=True), "Qwen2ForCausalLM")
