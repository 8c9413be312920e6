"""From an opened checkpoint to a `FusedDecoder` on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.packed_linear.layout import PackedFormat, PackedWeight
from firsttoken.kernels.paged_attention import AttentionParams, AttentionSpec, KVPool
from firsttoken.kernels.paged_attention.gpu import GPUAttention
from firsttoken.kernels.paged_attention.params import QKNorm
from firsttoken.kernels.rope import to_pair_order
from firsttoken.models.attention import attention_specs, spec_of_layer
from firsttoken.models.device_weights import DeviceWeights, Matrix
from firsttoken.models.fused import ChooseLinear, FusedDecoder, FusedLayer
from firsttoken.models.load import model_weights
from firsttoken.models.projection import Projection
from firsttoken.models.tensors import EMBEDDING, FINAL_NORM, HEAD, expected_tensors
from firsttoken.models.upload import UploadedWeights, Uploader
from firsttoken.models.weights import OutlineWeights, Weights
from firsttoken.quantization.as_stored import packed
from firsttoken.quantization.on_load import quantized
from firsttoken.quantization.rounded import RoundedWeight


@dataclass(frozen=True, slots=True)
class Limits:
    """What work space is made for: positions of a request, decode rows of a step, multiprocessors of the device; how
    configs of products are chosen there; whether a row's bits may depend on other rows; and what weights are rounded to
    (none, int4 or fp8)."""

    max_position: int
    max_rows: int
    sms: int
    choose_linear: ChooseLinear
    deterministic: bool = False
    quantization: str = "none"


@torch.inference_mode()
def load_fused(checkpoint: Checkpoint, pool: KVPool, device: torch.device, limits: Limits) -> FusedDecoder:
    """Read all weights as bfloat16 matrices in the kernels' order. Raises `CheckpointError` for tensors that do not
    fit the config."""
    with Uploader(device) as uploader:
        source = model_weights(
            checkpoint, torch.bfloat16, device, stored=lambda tensors: UploadedWeights(tensors, uploader)
        )
        model = _build(checkpoint.config, _on_device(source, device, limits), pool, limits)
        if isinstance(source, UploadedWeights):
            source.check()
    return model


@torch.inference_mode()
def outline_fused(config: ModelConfig, pool: KVPool, limits: Limits) -> FusedDecoder:
    """The same decoder without weights, on torch's meta device, to compile its kernels: of layers that launch the same
    ones two are kept (the first starts from offset 0, which could compile differently)."""
    outline = OutlineWeights(expected_tensors(config), config.quantized)
    model = _build(config, _on_device(outline, torch.device("meta"), limits), pool, limits)
    kinds: dict[object, int] = {}
    kept = []
    for layer in model.layers:
        attention = layer.attention
        weights = tuple(_kernels_of(projection.weight) for projection in layer.projections)
        kind = (id(attention.spec), attention.window, attention.qk_norm is None, weights)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= 2:
            kept.append(layer)
    model.layers = kept
    return model


def _on_device(source: Weights, device: torch.device, limits: Limits) -> DeviceWeights:
    return DeviceWeights(source, device, keep_rounded=limits.quantization != "none")


def _kernels_of(weight: Tensor | PackedWeight) -> object:
    """What of a weight decides which kernels multiply it, beside its size."""
    return (weight.format, weight.group, weight.zeros is None) if isinstance(weight, PackedWeight) else None


def _build(config: ModelConfig, weights: DeviceWeights, pool: KVPool, limits: Limits) -> FusedDecoder:
    specs = attention_specs(config, str(weights.device))
    embedding = weights.table(EMBEDDING)
    head = embedding if config.tie_word_embeddings else weights.matrix(HEAD)
    # What a quantized file holds in full was to stay so.
    pack = Packer("none" if config.quantized is not None else limits.quantization)
    return FusedDecoder(
        config=config,
        embedding=embedding,
        layers=[
            _layer(config, weights, pack, spec_of_layer(config, specs, index), index)
            for index in range(config.num_layers)
        ],
        final_gain=weights.vector(FINAL_NORM),
        # Four bits cost more in the head than anywhere else.
        head=Projection("head", pack.head(head)),
        attention=GPUAttention(pool, config.num_heads, limits.max_position, limits.max_rows, limits.sms),
        choose_linear=limits.choose_linear,
        deterministic=limits.deterministic,
    )


class Packer:
    """Rounds weights as they come, so that those in full are never all there; those that are rounded already are laid
    out as they are."""

    def __init__(self, quantization: str) -> None:
        self._format: PackedFormat | None = None if quantization == "none" else cast(PackedFormat, quantization)

    def __call__(self, weight: Matrix, name: str) -> Tensor | PackedWeight:
        """Raises `ConfigError` for a size that the kernels do not take."""
        if self._format is None and isinstance(weight, Tensor):
            return weight
        if weight.shape[0] % 16:  # the vendor's library wants it so
            raise ConfigError(f"{name} has {weight.shape[0]} rows, no multiple of 16: use --quantization none")
        if isinstance(weight, RoundedWeight):
            return packed(weight, name)
        assert self._format is not None
        return quantized(weight, self._format, name)

    def head(self, weight: Matrix) -> Tensor | PackedWeight:
        if isinstance(weight, RoundedWeight):
            return packed(weight, HEAD)
        return weight if self._format is None else quantized(weight, "fp8", HEAD)


def _layer(config: ModelConfig, weights: DeviceWeights, pack: Packer, spec: AttentionSpec, index: int) -> FusedLayer:
    prefix = f"model.layers.{index}."
    return FusedLayer(
        attention=AttentionParams(
            index, spec, _qk_norm(config, weights, prefix) if config.qk_norm else None, config.window(index)
        ),
        attention_gain=weights.vector(f"{prefix}input_layernorm.weight"),
        qkv=_qkv(config, weights, pack, f"{prefix}self_attn."),
        output=_projection(weights, pack, "residual", f"{prefix}self_attn.o_proj", config.output_bias),
        mlp_gain=weights.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=_gate_up(config, weights, pack, f"{prefix}mlp."),
        down=_projection(weights, pack, "residual", f"{prefix}mlp.down_proj", config.mlp_bias),
    )


def _projection(weights: DeviceWeights, pack: Packer, kind: OpKind, name: str, has_bias: bool) -> Projection:
    bias = _bias(weights.vector(f"{name}.bias")) if has_bias else None
    return Projection(kind, pack(weights.matrix(f"{name}.weight"), name), bias)


def _qkv(config: ModelConfig, weights: DeviceWeights, pack: Packer, prefix: str) -> Projection:
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    heads = (config.num_heads, config.num_kv_heads, 0)
    bias = None
    if config.attention_bias:
        bias = _bias(weights.vectors([f"{name}.bias" for name in names], heads))
    stacked = weights.stacked([f"{name}.weight" for name in names], heads)
    return Projection("plain", pack(stacked, f"{prefix}qkv"), bias)


def _gate_up(config: ModelConfig, weights: DeviceWeights, pack: Packer, prefix: str) -> Projection:
    gate, up = f"{prefix}gate_proj", f"{prefix}up_proj"
    bias = _bias(weights.interleaved_vectors(f"{gate}.bias", f"{up}.bias")) if config.mlp_bias else None
    both = weights.interleaved(f"{gate}.weight", f"{up}.weight")
    return Projection("gated", pack(both, f"{prefix}gate_up"), bias)


def _qk_norm(config: ModelConfig, weights: DeviceWeights, prefix: str) -> QKNorm:
    q, k = (to_pair_order(weights.vector(f"{prefix}self_attn.{name}_norm.weight"), 1) for name in "qk")
    return QKNorm(q, k, config.rms_norm_eps)


def _bias(values: Tensor) -> Tensor:
    """In the type of the products that it is added to."""
    return values.bfloat16()
