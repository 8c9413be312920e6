"""Llama, and what is built like it: Mistral, SmolLM2."""

from __future__ import annotations

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.models.blocks import DecoderLayer, LayerBuilder, Shape, attention_tensors, mlp_tensors, norm_tensors
from firsttoken.models.registry import Family, register


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    return norm_tensors(config) | attention_tensors(config) | mlp_tensors(config)


def build_layer(builder: LayerBuilder) -> DecoderLayer:
    return builder.layer()


register(Family(layer_tensors, build_layer, fused=True), "LlamaForCausalLM", "MistralForCausalLM")
