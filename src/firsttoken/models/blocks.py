"""What the families share: the tensors of each block, and the decoder layer that is built from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.layer_norm import LayerNorm
from firsttoken.kernels.paged_attention import AttentionContext, AttentionParams, AttentionSpec
from firsttoken.kernels.paged_attention.params import QKNorm
from firsttoken.kernels.rms_norm import RMSNorm
from firsttoken.kernels.rope import to_pair_order
from firsttoken.models.weights import Weights
from firsttoken.quantization import GatedLinear, Linear, LinearMethod
from firsttoken.quantization.stored import StoredTensor, concatenate

Shape = tuple[int, ...]


def attention_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Projections of the attention block, with the biases that the configuration names."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    tensors: dict[str, Shape] = {f"self_attn.{name}.weight": (n, config.hidden_size) for name, n in rows.items()}
    if config.attention_bias:
        tensors |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    tensors["self_attn.o_proj.weight"] = (config.hidden_size, queries)
    if config.output_bias:
        tensors["self_attn.o_proj.bias"] = (config.hidden_size,)
    return tensors


def qk_norm_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Norms of each query and key head."""
    return {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}


def mlp_tensors(config: ModelConfig) -> dict[str, Shape]:
    """The gated MLP."""
    wide, narrow = config.intermediate_size, config.hidden_size
    shapes = {"gate_proj": (wide, narrow), "up_proj": (wide, narrow), "down_proj": (narrow, wide)}
    tensors: dict[str, Shape] = {f"mlp.{name}.weight": shape for name, shape in shapes.items()}
    if config.mlp_bias:
        tensors |= {f"mlp.{name}.bias": shape[:1] for name, shape in shapes.items()}
    return tensors


def norm_tensors(config: ModelConfig) -> dict[str, Shape]:
    """The two norms before attention and MLP."""
    return {f"{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}


class Norm(Protocol):
    """``x [T, H]`` float32 -> ``[T, H]`` in the norm's own dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Layer(Protocol):
    """What a model asks of its layers. ``hidden [T, H]`` float32 is the residual stream."""

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        ...

    def attend(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """Attention's heads ``[T, Hq * D]``, before the output projection. Writes the step's K and V."""
        ...

    def finish(self, hidden: Tensor, heads: Tensor) -> None:
        """Add everything that follows `attend` to ``hidden``, in place."""
        ...


class DecoderLayer:
    """Pre-norm attention and gated MLP around a float32 residual stream, which is updated in place."""

    __slots__ = ("attention", "attention_norm", "down", "gate_up", "mlp_norm", "output", "qkv")

    def __init__(
        self,
        attention: AttentionParams,
        attention_norm: RMSNorm,
        qkv: Linear,
        output: Linear,
        mlp_norm: RMSNorm,
        gate_up: GatedLinear,
        down: Linear,
    ) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.output = output
        self.mlp_norm = mlp_norm
        self.gate_up = gate_up
        self.down = down

    def attend(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """``hidden [T, H]`` float32 -> attention's heads ``[T, Hq * D]``, before the output projection."""
        return context.attend(self.attention, self.qkv(self.attention_norm(hidden)))

    def finish(self, hidden: Tensor, heads: Tensor) -> None:
        """Add the output projection of ``heads`` and the MLP to ``hidden``."""
        hidden.add_(self.output(heads))
        hidden.add_(self.down(self.gate_up(self.mlp_norm(hidden))))

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.output.nbytes + self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes the parts of a model from its weights. ``norm_offset`` is added to each gain of an RMSNorm."""

    config: ModelConfig
    weights: Weights
    method: LinearMethod
    norm_offset: float

    def path(self, name: str) -> str:
        """The tensor's full name."""
        return name

    def gain(self, name: str) -> Tensor:
        return self.weights.vector(self.path(f"{name}.weight")) + self.norm_offset

    def rms_norm(self, name: str, dtype: torch.dtype | None = None) -> RMSNorm:
        """The norm ``name``; it gives ``dtype``, left out: what projections take."""
        return RMSNorm(self.gain(name), self.config.rms_norm_eps, dtype or self.method.dtype)

    def layer_norm(self, name: str, dtype: torch.dtype | None = None) -> LayerNorm:
        weight, bias = (self.weights.vector(self.path(f"{name}.{part}")) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, self.config.rms_norm_eps, dtype or self.method.dtype)

    def linear(self, name: str, has_bias: bool) -> Linear:
        bias = self.weights.vector(self.path(f"{name}.bias")) if has_bias else None
        return self.method.linear(self.weights.matrix(self.path(f"{name}.weight")), bias)


@dataclass(frozen=True, slots=True)
class LayerBuilder(Builder):
    """Builds the layer ``index`` of a model; families choose its parts, by names without ``model.layers.N.``."""

    spec: AttentionSpec
    index: int

    def layer(self, *, qk_norm: bool = False) -> DecoderLayer:
        """The layer of Llama and its kin, with or without QK norm."""
        return DecoderLayer(
            attention=self.attention(qk_norm=qk_norm),
            attention_norm=self.rms_norm("input_layernorm"),
            qkv=self.qkv(),
            output=self.linear("self_attn.o_proj", self.config.output_bias),
            mlp_norm=self.rms_norm("post_attention_layernorm"),
            gate_up=self.method.gated(*self.gate_up()),
            down=self.linear("mlp.down_proj", self.config.mlp_bias),
        )

    def path(self, name: str) -> str:
        return f"model.layers.{self.index}.{name}"

    def attention(self, *, qk_norm: bool = False) -> AttentionParams:
        norm = self._qk_norm() if qk_norm else None
        return AttentionParams(self.index, self.spec, norm, self.config.window(self.index))

    def qkv(self) -> Linear:
        """One projection of q, k and v, the first two in pair order."""
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads, "v_proj": 0}
        parts, biases = [], []
        for name, rotated_heads in heads.items():
            weight = self.weights.matrix(self.path(f"self_attn.{name}.weight"))
            if rotated_heads:
                weight = weight.map_rows(partial(to_pair_order, num_heads=rotated_heads))
            parts.append(weight)
            if self.config.attention_bias:
                bias = self.weights.vector(self.path(f"self_attn.{name}.bias"))
                biases.append(to_pair_order(bias, rotated_heads) if rotated_heads else bias)
        return self.method.linear(concatenate(parts), torch.cat(biases) if biases else None)

    def gate_up(self) -> tuple[StoredTensor, Tensor | None]:
        """Weight and bias of the MLP's first projection, the gate's rows first."""
        names = ("mlp.gate_proj", "mlp.up_proj")
        weight = concatenate([self.weights.matrix(self.path(f"{name}.weight")) for name in names])
        bias = None
        if self.config.mlp_bias:
            bias = torch.cat([self.weights.vector(self.path(f"{name}.bias")) for name in names])
        return weight, bias

    def _qk_norm(self) -> QKNorm:
        q, k = (to_pair_order(self.gain(f"self_attn.{name}"), 1) for name in ("q_norm", "k_norm"))
        return QKNorm(q, k, self.config.rms_norm_eps)
