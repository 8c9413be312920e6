"""What the GPU attention kernels share: how heads and tiles of K and V are loaded, how a head is normalised
and rotated, how a score is finished. All of it is inlined into the kernels of the sibling modules."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton decides when a kernel is defined whether it is compiled or interpreted, so this is a constant of the process.
INTERPRETED: Final[bool] = bool(triton.knobs.runtime.interpret)

LOG2E = tl.constexpr(1.4426950408889634)


_FORMATS = {torch.bfloat16: "native", torch.float32: "native"}


def kv_format_of(kv: Tensor) -> str:
    """The kernels' name for how ``kv`` stores its elements. Raises ValueError for a type they cannot read."""
    if kv.dtype not in _FORMATS:
        raise ValueError(f"the GPU attention kernels read bfloat16 and float32 KV, got {kv.dtype}: convert the pool")
    return _FORMATS[kv.dtype]


def compute_type(kv: Tensor) -> tl.dtype:
    """Type of the operands of matrix products: float32 for a float32 pool, and in the interpreter, which gets bf16
    products wrong."""
    return tl.float32 if INTERPRETED or kv.dtype == torch.float32 else tl.bfloat16


@triton.jit
def page_of(at, PAGE: tl.constexpr):
    """The page of position ``at``, which is not negative: a division that allows for it takes three operations more."""
    return (at.to(tl.uint32) // PAGE).to(tl.int32)


@triton.jit
def in_blocks(tile, blocks, block_stride):
    """Where ``tile`` lies in each of ``blocks``. A block's stride is a multiple of 32 elements, since it has 16 tokens'
    K and V: in units of that, products of 32 bits reach `pages.MOST_ELEMENTS`, with fewer operations than of 64."""
    units = blocks.to(tl.uint32) * (block_stride // 32).to(tl.uint32)
    return tile + units.to(tl.int64) * 32


@triton.jit
def load_heads(pointers, mask, eps, weight, offs_d, NORM: tl.constexpr, D: tl.constexpr):
    """Heads ``[R, DP]`` as float32, through RMSNorm over each head where ``NORM`` (``weight`` float32 ``[D]``)."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        gain = tl.load(weight + offs_d, mask=offs_d < D, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * gain[None, :]
    return x


@triton.jit
def load_turns(cos_sin, positions, there, offs_d, D: tl.constexpr, DP: tl.constexpr):
    """Cosines and sines ``[R, DP / 2]`` of ``positions [R]``."""
    at = cos_sin + positions.to(tl.int64)[:, None] * D + offs_d[None, :]
    turns = tl.load(at, mask=there[:, None] & (offs_d < D)[None, :], other=0.0)
    return tl.split(tl.reshape(turns, [positions.shape[0], DP // 2, 2]))


@triton.jit
def rotate(x, cos, sin, R: tl.constexpr, DP: tl.constexpr):
    """RoPE of ``x [R, DP]`` in pair order by ``cos, sin`` ``[R, DP / 2]``. Pairs stay within a thread."""
    even, odd = tl.split(tl.reshape(x, [R, DP // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [R, DP])


@triton.jit
def load_tile(
    tile, blocks, at, seen, block_stride, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DOT: tl.constexpr
):
    """K or V as stored, ``[BT, DP]`` or for CUDA cores ``[1, BT, DP]``; zero where not ``seen``: what an earlier owner
    left there may be NaN.

    The third dimension gives the loads the layout in which they are multiplied, so that nothing moves between threads.
    """
    offs_d = tl.arange(0, DP)
    rows = tile + blocks.to(tl.int64) * block_stride + at % PAGE * D
    if DOT:
        pointers, mask = rows[:, None] + offs_d[None, :], seen[:, None]
        if D != DP:
            mask = mask & (offs_d < D)[None, :]
    else:
        pointers, mask = rows[None, :, None] + offs_d[None, None, :], seen[None, :, None]
        if D != DP:
            mask = mask & (offs_d < D)[None, None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def decode_elements(stored, KV_FORMAT: tl.constexpr, COMPUTE: tl.constexpr):
    """Stored KV elements as operands."""
    tl.static_assert(KV_FORMAT == "native", "unknown KV format")
    return stored.to(COMPUTE)


@triton.jit
def finish_scores(raw, distance, slope, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log2 from raw products: scale, soft cap (Gemma 2), then ALiBi (Press et al., 2022).

    ``distance`` is key position minus query position (at most 0); ``scale`` carries log2(e) unless there is a cap,
    which works on natural units; ``slope`` is per head in natural units.
    """
    scores = raw * scale
    if SOFTCAP:
        # tanh by exp2: an overflow gives 1 - 2 / inf, the right limit.
        grown = tl.exp2(scores * (2.0 * LOG2E / softcap))
        scores = (softcap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))
    if ALIBI:
        scores += slope * LOG2E * distance.to(tl.float32)
    return scores
