"""Gemma 2 and Gemma 3 (text): a norm behind attention and MLP too, GeGLU, and an embedding scaled by its width.

Both alternate layers with a window and layers without; Gemma 2 caps scores and logits, Gemma 3 norms q and k and has
a rope table for each kind of layer. All of that comes with the configuration.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.gelu import gelu_mul
from firsttoken.kernels.paged_attention import AttentionContext
from firsttoken.kernels.rms_norm import RMSNorm
from firsttoken.models.blocks import (
    Builder,
    DecoderLayer,
    LayerBuilder,
    Shape,
    attention_tensors,
    mlp_tensors,
    norm_tensors,
    qk_norm_tensors,
)
from firsttoken.models.embedding import Embedding, ScaledEmbedding
from firsttoken.models.registry import Family, register
from firsttoken.quantization.linear import FusedGate
from firsttoken.quantization.row_table import RowTable

_MORE_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


class GemmaLayer:
    """A `Layer` with norms before and behind attention and MLP; those behind give float32."""

    __slots__ = ("behind_attention", "behind_mlp", "inner")

    def __init__(self, inner: DecoderLayer, behind_attention: RMSNorm, behind_mlp: RMSNorm) -> None:
        self.inner = inner
        self.behind_attention = behind_attention
        self.behind_mlp = behind_mlp

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def attend(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        return self.inner.attend(hidden, context)

    def finish(self, hidden: Tensor, heads: Tensor) -> None:
        inner = self.inner
        hidden.add_(self.behind_attention(inner.output(heads).float()))
        hidden.add_(self.behind_mlp(inner.down(inner.gate_up(inner.mlp_norm(hidden))).float()))


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    norms: dict[str, Shape] = {f"{name}.weight": (config.hidden_size,) for name in _MORE_NORMS}
    tensors = norm_tensors(config) | attention_tensors(config) | norms | mlp_tensors(config)
    return tensors | qk_norm_tensors(config) if config.qk_norm else tensors


def build_layer(builder: LayerBuilder) -> GemmaLayer:
    config = builder.config
    weight, bias = builder.gate_up()
    inner = DecoderLayer(
        attention=builder.attention(qk_norm=config.qk_norm),
        attention_norm=builder.rms_norm("input_layernorm"),
        qkv=builder.qkv(),
        output=builder.linear("self_attn.o_proj", config.output_bias),
        mlp_norm=builder.rms_norm("pre_feedforward_layernorm"),
        gate_up=FusedGate(builder.method.linear(weight, bias), gelu_mul),
        down=builder.linear("mlp.down_proj", config.mlp_bias),
    )
    behind = (builder.rms_norm(f"post_{name}_layernorm", torch.float32) for name in ("attention", "feedforward"))
    return GemmaLayer(inner, *behind)


def embedding(builder: Builder, table: RowTable) -> Embedding:
    return ScaledEmbedding(table, math.sqrt(builder.config.hidden_size))


# Gains are stored as their distance from one.
register(
    Family(layer_tensors, build_layer, embedding=embedding, norm_offset=1.0), "Gemma2ForCausalLM", "Gemma3ForCausalLM"
)
