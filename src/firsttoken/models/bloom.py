"""BLOOM: ALiBi in place of rotation, LayerNorm, a plain GELU MLP, biases throughout and a norm on the embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.gelu import gelu
from firsttoken.kernels.layer_norm import LayerNorm
from firsttoken.kernels.paged_attention import AttentionContext, AttentionParams
from firsttoken.models.blocks import Builder, LayerBuilder, Norm, Shape
from firsttoken.models.embedding import Embedding, NormedEmbedding
from firsttoken.models.registry import Family, register
from firsttoken.quantization import Linear
from firsttoken.quantization.row_table import RowTable

_QKV, _OUTPUT = "self_attention.query_key_value", "self_attention.dense"
_UP, _DOWN = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_EMBEDDING_NORM, _FINAL_NORM = "model.embed_norm", "model.norm"


class BloomLayer:
    """A `Layer`: pre-norm attention and MLP."""

    __slots__ = ("attention", "attention_norm", "down", "mlp_norm", "output", "qkv", "up")

    def __init__(
        self,
        attention: AttentionParams,
        attention_norm: LayerNorm,
        qkv: Linear,
        output: Linear,
        mlp_norm: LayerNorm,
        up: Linear,
        down: Linear,
    ) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.output = output
        self.mlp_norm = mlp_norm
        self.up = up
        self.down = down

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.output.nbytes + self.up.nbytes + self.down.nbytes

    def attend(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        return context.attend(self.attention, self.qkv(self.attention_norm(hidden)))

    def finish(self, hidden: Tensor, heads: Tensor) -> None:
        hidden.add_(self.output(heads))
        hidden.add_(self.down(gelu(self.up(self.mlp_norm(hidden)))))


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    wide, narrow = config.intermediate_size, config.hidden_size
    matrices = {_QKV: (3 * narrow, narrow), _OUTPUT: (narrow, narrow), _UP: (wide, narrow), _DOWN: (narrow, wide)}
    tensors: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    tensors |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return tensors | {f"{name}.{part}": (narrow,) for name in _NORMS for part in ("weight", "bias")}


def other_tensors(config: ModelConfig) -> dict[str, Shape]:
    names = (f"{_EMBEDDING_NORM}.weight", f"{_EMBEDDING_NORM}.bias", f"{_FINAL_NORM}.bias")
    return dict.fromkeys(names, (config.hidden_size,))


def build_layer(builder: LayerBuilder) -> BloomLayer:
    return BloomLayer(
        attention=builder.attention(),
        attention_norm=builder.layer_norm(_NORMS[0]),
        qkv=_qkv(builder),
        output=builder.linear(_OUTPUT, has_bias=True),
        mlp_norm=builder.layer_norm(_NORMS[1]),
        up=builder.linear(_UP, has_bias=True),
        down=builder.linear(_DOWN, has_bias=True),
    )


def _qkv(builder: LayerBuilder) -> Linear:
    """The stored rows are q, k and v of head 0, then of head 1, ...; attention takes all of q, then k, then v."""
    weight = builder.weights.matrix(builder.path(f"{_QKV}.weight"))
    bias = builder.weights.vector(builder.path(f"{_QKV}.bias"))
    heads = builder.config.num_heads
    return builder.method.linear(weight.map_rows(lambda rows: _by_kind(rows, heads)), _by_kind(bias, heads))


def _by_kind(rows: Tensor, heads: int) -> Tensor:
    return rows.view(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def embedding(builder: Builder, table: RowTable) -> Embedding:
    return NormedEmbedding(table, builder.layer_norm(_EMBEDDING_NORM, torch.float32))


def final_norm(builder: Builder) -> Norm:
    return builder.layer_norm(_FINAL_NORM)


register(
    Family(layer_tensors, build_layer, other_tensors=other_tensors, embedding=embedding, final_norm=final_norm),
    "BloomForCausalLM",
)
