"""Which layout a tensor in memory gets: the one place that decides, called where the tensor is made.

`bench layout` measures the alternatives; `docs/performance.md` has the table that these rules follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Capability = tuple[int, int]

KINDS = ("kv", "weight", "conv")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
# What one load instruction of a thread takes, and what a row of a tensor-core tile must be a multiple of.
VECTOR_BYTES = 16
# What memory is read in: a piece that begins or ends inside a sector costs the whole of it.
SECTOR_BYTES = 32
# From Volta on, convolutions on tensor cores read channels innermost.
CHANNELS_LAST_SINCE: Capability = (7, 0)


@dataclass(frozen=True)
class Layout:
    """``dims`` name the storage's dimensions, outermost first; ``run_bytes`` is the longest piece that a consumer of
    one unit (one head's K of a block, one output row, one pixel's channels) finds in one place. ``why`` is for logs and
    tables."""

    kind: str
    name: str
    dims: tuple[str, ...]
    run_bytes: int
    why: str


def choose_layout(
    kind: str, shape: tuple[int, ...], head_dim: int, dtype: str, capability: Capability | None
) -> Layout:
    """The layout of a tensor of this ``kind``:

    - "kv": ``shape`` is ``(layers, kv_heads, block_tokens)`` of the cache;
    - "weight": ``(rows, columns)`` of a projection ``y = W x``, ``head_dim`` 0;
    - "conv": ``(batch, channels, height, width)`` of a convolution's input, ``head_dim`` 0.

    ``capability`` is a CUDA device's, None for a CPU. Raises ValueError for what it does not know.
    """
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"no layout is known for elements of {dtype!r}: choose one of {', '.join(ELEMENT_BYTES)}")
    size = ELEMENT_BYTES[dtype]
    ranks = {"kv": 3, "weight": 2, "conv": 4}
    if kind not in ranks:
        raise ValueError(f"unknown kind of tensor {kind!r}: choose one of {', '.join(KINDS)}")
    if len(shape) != ranks[kind] or min(shape) < 1 or head_dim < (1 if kind == "kv" else 0):
        raise ValueError(
            f"a {kind!r} tensor needs {ranks[kind]} sizes of 1 or more, got {shape} and head_dim {head_dim}"
        )
    if kind == "kv":
        return _kv(shape, head_dim, size)
    if kind == "weight":
        return _weight(shape, size, capability)
    return _conv(shape, size, capability)


def device_capability(device: str) -> Capability | None:
    """What `choose_layout` asks for: a CUDA device's compute capability, None for any other device."""
    return torch.cuda.get_device_capability(device) if device.partition(":")[0] == "cuda" else None


def _kv(shape: tuple[int, ...], head_dim: int, size: int) -> Layout:
    _, kv_heads, block_tokens = shape
    run = block_tokens * head_dim * size
    # Every attention kernel reads this order; the others that are measured differ in the pieces that a head's reader
    # finds, and in whether a block can be moved between memories in one copy.
    why = f"a head's {block_tokens} tokens in one piece of {run} bytes"
    if kv_heads > 1:
        why += f", not in pieces of {head_dim * size}"
        if head_dim * size % SECTOR_BYTES:
            why += f" that share sectors of {SECTOR_BYTES}"
    return Layout("kv", "slab_heads", ("block", "layer", "k_or_v", "head", "token", "dim"), run, why)


def _weight(shape: tuple[int, ...], size: int, capability: Capability | None) -> Layout:
    row = shape[1] * size
    if capability is not None and row % VECTOR_BYTES:
        return Layout(
            "weight",
            "rows_padded",
            ("row", "column"),
            row,
            f"rows of {row} bytes begin between vectors of {VECTOR_BYTES}",
        )
    return Layout("weight", "rows", ("row", "column"), row, "an output needs its row alone, and finds it in one piece")


def _conv(shape: tuple[int, ...], size: int, capability: Capability | None) -> Layout:
    channels, pixels = shape[1], shape[2] * shape[3]
    fills = channels * size % VECTOR_BYTES == 0
    if fills and (capability is None or capability >= CHANNELS_LAST_SINCE):
        nhwc = ("batch", "height", "width", "channel")
        return Layout("conv", "nhwc", nhwc, channels * size, "a sum runs over channels, which lie together here")
    nchw = ("batch", "channel", "height", "width")
    why = "this device has no matrix units that read channels" if fills else f"{channels} channels do not fill vectors"
    return Layout("conv", "nchw", nchw, pixels * size, f"{why}: pixels do")
