"""From an opened checkpoint to a `FusedDecoder` on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.paged_attention import AttentionParams, AttentionSpec, KVPool
from firsttoken.kernels.paged_attention.gpu import GPUAttention
from firsttoken.kernels.paged_attention.params import QKNorm
from firsttoken.kernels.rope import to_pair_order
from firsttoken.models.attention import attention_specs, spec_of_layer
from firsttoken.models.device_weights import DeviceWeights
from firsttoken.models.fused import ChooseLinear, FusedDecoder, FusedLayer, Projection
from firsttoken.models.load import model_weights
from firsttoken.models.tensors import EMBEDDING, FINAL_NORM, HEAD, expected_tensors
from firsttoken.models.upload import UploadedWeights, Uploader
from firsttoken.models.weights import OutlineWeights


@dataclass(frozen=True, slots=True)
class Limits:
    """What work space is made for: positions of a request, decode rows of a step, multiprocessors of the device; how
    configs of products are chosen there; and whether a row's bits may depend on other rows."""

    max_position: int
    max_rows: int
    sms: int
    choose_linear: ChooseLinear
    deterministic: bool = False


@torch.inference_mode()
def load_fused(checkpoint: Checkpoint, pool: KVPool, device: torch.device, limits: Limits) -> FusedDecoder:
    """Read all weights as bfloat16 matrices in the kernels' order. Raises `CheckpointError` for tensors that do not
    fit the config."""
    with Uploader(device) as uploader:
        source = model_weights(
            checkpoint, torch.bfloat16, device, stored=lambda tensors: UploadedWeights(tensors, uploader)
        )
        model = _build(checkpoint.config, DeviceWeights(source, device), pool, limits)
        if isinstance(source, UploadedWeights):
            source.check()
    return model


@torch.inference_mode()
def outline_fused(config: ModelConfig, pool: KVPool, limits: Limits) -> FusedDecoder:
    """The same decoder without weights, on torch's meta device, to compile its kernels: of layers that launch the same
    ones two are kept (the first starts from offset 0, which could compile differently)."""
    model = _build(config, DeviceWeights(OutlineWeights(expected_tensors(config)), torch.device("meta")), pool, limits)
    kinds: dict[object, int] = {}
    kept = []
    for layer in model.layers:
        attention = layer.attention
        kind = (id(attention.spec), attention.window, attention.qk_norm is None)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= 2:
            kept.append(layer)
    model.layers = kept
    return model


def _build(config: ModelConfig, weights: DeviceWeights, pool: KVPool, limits: Limits) -> FusedDecoder:
    specs = attention_specs(config, str(weights.device))
    embedding = weights.matrix(EMBEDDING)
    head = embedding if config.tie_word_embeddings else weights.matrix(HEAD)
    return FusedDecoder(
        config=config,
        embedding=embedding,
        layers=[
            _layer(config, weights, spec_of_layer(config, specs, index), index) for index in range(config.num_layers)
        ],
        final_gain=weights.vector(FINAL_NORM),
        head=Projection("head", head),
        attention=GPUAttention(pool, config.num_heads, limits.max_position, limits.max_rows, limits.sms),
        choose_linear=limits.choose_linear,
        deterministic=limits.deterministic,
    )


def _layer(config: ModelConfig, weights: DeviceWeights, spec: AttentionSpec, index: int) -> FusedLayer:
    prefix = f"model.layers.{index}."
    return FusedLayer(
        attention=AttentionParams(
            index, spec, _qk_norm(config, weights, prefix) if config.qk_norm else None, config.window(index)
        ),
        attention_gain=weights.vector(f"{prefix}input_layernorm.weight"),
        qkv=_qkv(config, weights, f"{prefix}self_attn."),
        output=_projection(weights, "residual", f"{prefix}self_attn.o_proj", config.output_bias),
        mlp_gain=weights.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=_gate_up(config, weights, f"{prefix}mlp."),
        down=_projection(weights, "residual", f"{prefix}mlp.down_proj", config.mlp_bias),
    )


def _projection(weights: DeviceWeights, kind: OpKind, name: str, has_bias: bool) -> Projection:
    bias = _bias(weights.vector(f"{name}.bias")) if has_bias else None
    return Projection(kind, weights.matrix(f"{name}.weight"), bias)


def _qkv(config: ModelConfig, weights: DeviceWeights, prefix: str) -> Projection:
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    heads = (config.num_heads, config.num_kv_heads, 0)
    bias = None
    if config.attention_bias:
        bias = _bias(weights.vectors([f"{name}.bias" for name in names], heads))
    return Projection("plain", weights.stacked([f"{name}.weight" for name in names], heads), bias)


def _gate_up(config: ModelConfig, weights: DeviceWeights, prefix: str) -> Projection:
    gate, up = f"{prefix}gate_proj", f"{prefix}up_proj"
    bias = _bias(weights.interleaved_vectors(f"{gate}.bias", f"{up}.bias")) if config.mlp_bias else None
    return Projection("gated", weights.interleaved(f"{gate}.weight", f"{up}.weight"), bias)


def _qk_norm(config: ModelConfig, weights: DeviceWeights, prefix: str) -> QKNorm:
    q, k = (to_pair_order(weights.vector(f"{prefix}self_attn.{name}_norm.weight"), 1) for name in "qk")
    return QKNorm(q, k, config.rms_norm_eps)


def _bias(values: Tensor) -> Tensor:
    """In the type of the products that it is added to."""
    return values.bfloat16()
