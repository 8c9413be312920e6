"""What the GPU attention kernels share: how a head is loaded, normalised and rotated, how a score is finished, how
KV elements are decoded, and how the parts of a split row are combined. All of it is inlined into the kernels of the
sibling modules."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton decides when a kernel is defined whether it is compiled or interpreted, so this is a constant of the process.
INTERPRETED: Final[bool] = bool(triton.knobs.runtime.interpret)

LOG2E = tl.constexpr(1.4426950408889634)
# A NaN that arithmetic never makes: the hardware's own NaN is 0x7fffffff, and bf16 inputs have zeros at the end.
_EMPTY = tl.constexpr(-1)
# About a second of reading: a lost part becomes NaN, which the sampler reports, and never a hang.
_MAX_READS = tl.constexpr(1 << 20)

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
    """RoPE of ``x [R, DP]`` in pair order by ``cos, sin`` ``[R or 1, DP / 2]``. Pairs stay within a thread."""
    even, odd = tl.split(tl.reshape(x, [R, DP // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [R, DP])


@triton.jit
def decode_elements(stored, KV_FORMAT: tl.constexpr, COMPUTE: tl.constexpr):
    """Stored KV elements as operands. A quantised format multiplies its scales in here."""
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


@triton.jit
def part_bits(x):
    """Bits of float32 ``x``, with another NaN in place of the one that means "not yet written"."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == _EMPTY, 0x7FFFFFFF, bits)


@triton.jit
def combine_parts(
    parts,
    weights,
    target,
    cell,
    active,
    GROUP: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
    COMBINED: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Add the parts of ``active`` splits, always in the same order, and store the rows of ``target``."""
    offs_g = tl.arange(0, GROUP_PARTS)
    offs_d = tl.arange(0, DP)
    heads_in = offs_g < GROUP
    whole = heads_in[:, None] & (offs_d < D)[None, :]
    top = tl.full([GROUP_PARTS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PARTS], tl.float32)
    acc = tl.zeros([GROUP_PARTS, DP], tl.float32)
    for chunk in tl.static_range(0, SPLITS, COMBINED):
        offs_s = chunk + tl.arange(0, COMBINED)
        there = offs_s < active
        cells = (cell + offs_s)[:, None] * GROUP + offs_g[None, :]
        cells_in = there[:, None] & heads_in[None, :]
        at = parts + cells.to(tl.int64)[:, :, None] * D + offs_d[None, None, :]
        at_in = there[:, None, None] & whole[None, :, :]
        if WORDS:
            weight, part = _read_words(weights + cells, cells_in, at, at_in, COMPILED)
        else:
            weight = tl.load(weights + cells, mask=cells_in, other=0, cache_modifier=".cg")
            part = tl.load(at, mask=at_in, other=0, cache_modifier=".cg")
        weight = tl.where(there[:, None], weight.to(tl.float32, bitcast=True), float("-inf"))
        part = part.to(tl.float32, bitcast=True)
        # The first chunk always has a part, so `grown` is a number.
        grown = tl.maximum(top, tl.max(weight, 0))
        shrink = tl.exp2(top - grown)
        factor = tl.exp2(weight - grown[None, :])
        total = total * shrink + tl.sum(factor, 0)
        acc = acc * shrink[:, None] + tl.sum(part * factor[:, :, None], 0)
        top = grown
    result = acc / total[:, None]
    tl.store(target + offs_g[:, None] * D + offs_d[None, :], result.to(target.dtype.element_ty), mask=whole)


@triton.jit
def _read_words(weights_at, weights_in, parts_at, parts_in, COMPILED: tl.constexpr):
    """Read until every word has been written, then mark all of them as not written for the next launch.

    A word is whole by itself (32 bits), so no order between words is needed, and no fence.
    """
    weight = tl.load(weights_at, mask=weights_in, other=0, volatile=True)
    part = tl.load(parts_at, mask=parts_in, other=0, volatile=True)
    missing = tl.max((part == _EMPTY).to(tl.int32))
    reads = 0
    while (missing > 0) & (reads < _MAX_READS):
        weight = tl.load(weights_at, mask=weights_in, other=0, volatile=True)
        part = tl.load(parts_at, mask=parts_in, other=0, volatile=True)
        missing = tl.max((part == _EMPTY).to(tl.int32))
        reads += 1
    if COMPILED:
        # An element may lie in several threads, of which the loop asked one; weights it has not asked for at all.
        weight = _settled(weight, weights_at)
        part = _settled(part, parts_at)
    tl.debug_barrier()
    tl.store(weights_at, tl.full(weight.shape, _EMPTY, tl.int32), mask=weights_in)
    tl.store(parts_at, tl.full(part.shape, _EMPTY, tl.int32), mask=parts_in)
    return weight, part


@triton.jit
def _settled(word, at):
    """``word``, read again from ``at`` by the thread that holds it for as long as it is not written (bounded)."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred again;
        .reg .b32 left;
        mov.b32 $0, $1;
        mov.b32 left, 65536;
        look:
        setp.eq.b32 again, $0, -1;
        @!again bra done;
        ld.volatile.global.b32 $0, [$2];
        sub.s32 left, left, 1;
        setp.ne.s32 again, left, 0;
        @again bra look;
        done:
        }""",
        "=&r,r,l",
        [word, at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
