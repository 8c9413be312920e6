"""Any decoder as a step model: the families whose layers the fused kernels don't have, block by block on the device.

Attention is the GPU's, everything else torch's own operations, so a step has several times the launches of a fused one;
in a graph they cost a microsecond each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.paged_attention import AttentionContext, AttentionParams, AttentionSpec, KVPool
from firsttoken.kernels.paged_attention.gpu import GPUAttention
from firsttoken.models.decoder import DecoderModel
from firsttoken.models.load import build_decoder, model_weights
from firsttoken.models.load_fused import Limits
from firsttoken.models.step_view import Kept, Logits, StepView
from firsttoken.models.tensors import expected_tensors
from firsttoken.models.upload import UploadedWeights, Uploader
from firsttoken.models.weights import OutlineWeights, Weights
from firsttoken.quantization import StoredTensor
from firsttoken.quantization.unpacked import UnpackedMethod


class ComposedDecoder:
    """A `StepModel` around a `DecoderModel` whose weights are on the device."""

    def __init__(self, decoder: DecoderModel, attention: GPUAttention) -> None:
        self._decoder = decoder
        self._attention = attention
        self.vocab_size = decoder.config.vocab_size
        self.tile_rows = attention.tile_rows

    @property
    def nbytes(self) -> int:
        return self._decoder.nbytes

    def forward(self, step: StepView, kept: Kept | None = None) -> Logits | None:
        positions = step.positions.long().clamp_min(0)  # padding rows compute something that nobody reads
        tokens = step.tokens[step.slots.long(), positions].long()
        rows = step.sample_rows.long()
        count = rows.shape[0]
        if count == tokens.shape[0] and not step.identity:
            # As many samples as rows would mean "all of them, in order" to the decoder.
            rows = torch.cat((rows, rows[:1]))
        context = cast(AttentionContext, _StepAttention(step, self._attention))
        if kept is not None:
            every = torch.arange(tokens.shape[0], device=tokens.device)
            states = self._decoder.forward(tokens, positions, context, every)
            kept.hidden, hidden = states.index_select(0, kept.rows), states.index_select(0, rows)
        else:
            hidden = self._decoder.forward(tokens, positions, context, rows)
        return Logits(self._decoder.logits(hidden)[:count], None) if count else None

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class _StepAttention:
    """What layers see of attention in a step, as `AttentionContext`."""

    __slots__ = ("_attention", "_step")

    def __init__(self, step: StepView, attention: GPUAttention) -> None:
        self._step = step
        self._attention = attention

    def begin(self, specs: Sequence[AttentionSpec], positions: Tensor) -> None:
        """Nothing is made for a step: the kernels look positions up themselves."""

    def attend(self, layer: AttentionParams, qkv: Tensor) -> Tensor:
        return self._attention.attend(self._step, layer, qkv)


class _OnDevice:
    """`Weights` that are all on the device."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def matrix(self, name: str) -> StoredTensor:
        stored = self._weights.matrix(name)
        if stored.data.device == self._device:
            return stored
        return StoredTensor.dense(name, stored.dequantize(torch.bfloat16).to(self._device))

    def vector(self, name: str) -> Tensor:
        return self._weights.vector(name).to(self._device)


@torch.inference_mode()
def load_composed(checkpoint: Checkpoint, pool: KVPool, device: torch.device, limits: Limits) -> ComposedDecoder:
    """Read all weights as bfloat16. Raises `CheckpointError` for tensors that do not fit the config."""
    config = checkpoint.config
    with Uploader(device) as uploader:
        source = model_weights(
            checkpoint, torch.bfloat16, device, stored=lambda tensors: UploadedWeights(tensors, uploader)
        )
        method = UnpackedMethod(torch.bfloat16, prepack=False)
        decoder = build_decoder(config, _OnDevice(source, device), method, device)
        if isinstance(source, UploadedWeights):
            source.check()
    return _compose(decoder, pool, limits)


@torch.inference_mode()
def outline_composed(config: ModelConfig, pool: KVPool, limits: Limits) -> ComposedDecoder:
    """The same decoder without weights, on torch's meta device, to compile its kernels."""
    weights, device = OutlineWeights(expected_tensors(config), config.quantized), torch.device("meta")
    return _compose(build_decoder(config, weights, UnpackedMethod(torch.bfloat16, prepack=False), device), pool, limits)


def _compose(decoder: DecoderModel, pool: KVPool, limits: Limits) -> ComposedDecoder:
    heads = decoder.config.num_heads
    return ComposedDecoder(decoder, GPUAttention(pool, heads, limits.max_position, limits.max_rows, limits.sms))
