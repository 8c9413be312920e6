"""What a decode step must read, and how fast a device could read it: the roof that figures are held against."""

from __future__ import annotations

from firsttoken.checkpoint.checkpoint import Checkpoint, TensorInfo
from firsttoken.checkpoint.quantized.scheme import BITS
from firsttoken.executor.memory_plan.weights import ROUNDED_BITS
from firsttoken.transport.messages import EngineInfo

# GB/s at which one kernel that also does a decode step's arithmetic read 15 GB of weights: measured, by the name that
# the device gives itself. The data sheet says 4,800 for an H200, which no program gets.
READ_ROOF_GB_S = {"NVIDIA H200": 4520.0}

_BITS: dict[str, int] = dict(BITS.items())
_BYTES = {"float32": 4, "bfloat16": 2}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Types that the CPU's packed form keeps in about the file's own bytes; it computes the others in bfloat16.
_KEPT_PACKED = frozenset({"Q4_0", "Q4_1"})


def read_roof_gb_s(device_name: str) -> float | None:
    """None for a device that was not measured."""
    return READ_ROOF_GB_S.get(device_name)


def weight_bytes(checkpoint: Checkpoint, quantization: str, dtype: str) -> int | None:
    """Bytes of weights that one decode step reads: all of them but an embedding table that is not also the head.

    None for a ``quantization`` whose stored size is not known here.
    """
    if quantization in _BITS:
        return (_rounded if checkpoint.config.quantized is None else _as_stored)(checkpoint, quantization)
    if quantization not in ("none", "packed") or dtype not in _BYTES:
        return None
    tied = checkpoint.config.tie_word_embeddings
    return sum(
        _kept_bytes(info, quantization, dtype)
        for name, info in checkpoint.tensors.infos().items()
        if tied or name != _EMBEDDING
    )


def _kept_bytes(info: TensorInfo, quantization: str, dtype: str) -> int:
    if quantization == "packed" and info.name in (_EMBEDDING, _HEAD):
        return info.num_elements  # in int8, as one of few requests reads it
    if quantization == "packed" and info.type in _KEPT_PACKED:
        return info.nbytes
    return info.num_elements * _BYTES[dtype]


def _rounded(checkpoint: Checkpoint, quantization: str) -> int:
    """The head is of eight bits in any case; scales are some per cent more."""
    config, infos = checkpoint.config, dict(checkpoint.tensors.infos())
    head = infos.pop(_EMBEDDING if config.tie_word_embeddings else _HEAD).num_elements
    infos.pop(_EMBEDDING, None)
    matrices = sum(info.num_elements for info in infos.values() if len(info.shape) == 2)
    return head + matrices * _BITS[quantization] // 8


def _as_stored(checkpoint: Checkpoint, quantization: str) -> int:
    """Of a file that is rounded already: what it holds in full is read in bfloat16, as are integers of eight bits but
    where the CPU computes with those."""
    bits = {**ROUNDED_BITS, quantization: _BITS[quantization]}
    config, infos = checkpoint.config, dict(checkpoint.tensors.infos())
    if not config.tie_word_embeddings:
        infos.pop(_EMBEDDING)
    elif _HEAD in infos:
        infos.pop(_HEAD)
    return sum(
        info.num_elements * bits.get(info.rounded.format if info.rounded else "", 16) // 8
        for info in infos.values()
        if len(info.shape) == 2
    )


def kv_bytes(info: EngineInfo, batch: int, input_tokens: int, output_tokens: int) -> float:
    """Bytes of K and V that a decode step reads, on the average over the steps of ``output_tokens``.

    The step that computes output token ``i + 1`` (``i`` from 1) reads the prompt and ``i`` tokens behind it.
    """
    context = input_tokens + output_tokens / 2
    return batch * context * info.bytes_per_block / info.block_tokens
