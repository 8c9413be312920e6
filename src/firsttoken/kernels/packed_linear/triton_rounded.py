"""``y = x W^T`` where x is FP8: for more rows than W's reading hides the products of.

FP8 weights are multiplied as they are, and their sums stay in the tensor cores. A nibble of int4, as a byte, *is* an
e4m3: 0 to 15 times 2^-9, exactly. So three operations unpack eight weights, and what a zero point of 8 adds to each
group's sum, which is the same for all its columns, is taken off beforehand from the sums of x. A group's products are
summed in the tensor cores, groups in float32 with their scales.
"""

# ruff: noqa: RET505, SIM108 - Triton leaves out the branch not taken only when both stand in one if statement.
from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.linear.triton import finish, load_matrix, load_vector, meet

_NIBBLES = tl.constexpr("{ and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f; }")
_UNIT = tl.constexpr(2.0**-9)  # an e4m3 of 1 in its lowest bit


@triton.jit
def _nibbles(w, PLAIN: tl.constexpr):
    """Bytes as the e4m3 of their lower and upper halves."""
    if PLAIN:
        return (w & 15).to(tl.float32) * _UNIT, (w >> 4).to(tl.float32) * _UNIT
    else:
        lower, upper = tl.inline_asm_elementwise(
            _NIBBLES, "=&r,=&r,r", [w], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
        return lower.to(tl.float8e4nv, bitcast=True), upper.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _dot(w, x, PLAIN: tl.constexpr):
    if PLAIN:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), out_dtype=tl.float32)
    else:
        return tl.dot(w, x, out_dtype=tl.float32)


@triton.jit
def _both(lower, upper):
    """Rows g of the tiles above their rows g + 8."""
    rows: tl.constexpr = 2 * lower.shape[0]
    if len(lower.shape) == 1:
        return tl.reshape(tl.permute(tl.join(lower, upper), (1, 0)), [rows])
    else:
        return tl.reshape(tl.permute(tl.join(lower, upper), (2, 0, 1)), [rows, lower.shape[1]])


@triton.jit
def _scale_of(pair, g):
    """The g-th of pairs of bfloat16 in int32. Halves would be too short for copies that run ahead."""
    bits = tl.where(g % 2 == 0, pair << 16, pair & -65536)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _offsets(
    scales, zeros, rows, begin, end, GROUP: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """What each row of W times a group's sum of x is too much, ``[rows, SPAN]``."""
    EACH: tl.constexpr = 256 // GROUP
    group = begin + tl.arange(0, SPAN)
    at = rows[:, None] + (group // EACH * (16 * EACH) + group % EACH)[None, :]
    live = (group < end)[None, :]
    scale = tl.load(scales + at, mask=live, other=0.0).to(tl.float32)
    if zeros is None:
        return scale * (8.0 * _UNIT)
    else:
        return scale * ((tl.load(zeros + at, mask=live, other=0.0).to(tl.float32) - 128.0) * _UNIT)


@triton.jit
def _end(
    acc, out, residual, bias, x_scale, tile, first, M, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Scales of x and the epilogue for rows ``first`` and on."""
    acc *= x_scale[None, :]
    columns = tile * BN + tl.arange(0, BN)
    begin = first.to(tl.int64)
    if residual is not None:
        residual += begin * N
    tiles = load_matrix(residual, tl.arange(0, BM), columns, M - first, N)
    out += begin * (N // 2 if KIND == "gated" else N)
    finish(
        acc, out, tiles, load_vector(bias, columns, N, BN), 0.0, 0.0, None, None, None, None, None, None, M - first,
        tile, 0, N, BN, BM, KIND,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def int4_rounded_kernel(
    x, x_scales, x_sums, words, scales, zeros, out, residual, bias, partial, arrived, M,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    SPLIT: tl.constexpr, SPAN: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, part of K, block of rows): neighbours share W. SPAN groups a part, PADDED to a power of two."""
    KP: tl.constexpr = (K - 1) // 64 * 64 + 64
    GROUPS: tl.constexpr = K // GROUP
    EACH: tl.constexpr = 256 // GROUP
    TILES: tl.constexpr = (N - 1) // 16 + 1
    blocks = tl.cdiv(M, BM)
    place = tl.program_id(0)
    first = place % blocks * BM
    part = place // blocks % SPLIT
    tile = place // blocks // SPLIT
    half, inner = tl.arange(0, BN // 2), tl.arange(0, GROUP)
    mine = tile * (BN // 16) + half // 8
    if TILES % (BN // 16) != 0:
        mine = tl.minimum(mine, TILES - 1)
    if GROUP == 32:  # eight bytes of each lane; the next eight are the group's that follows
        inside = inner // 8 * 16 + inner % 8
    else:
        inside = inner // 64 * 512 + inner % 64
    w_at = words + (mine.to(tl.int64) * (CHUNKS * 2048) + half % 8 * 64)[:, None] + inside[None, :]
    pairs = scales.to(tl.pointer_type(tl.int32)) + mine * (CHUNKS * 8 * EACH) + half % 8 * (EACH // 2)
    begin = part * SPAN
    end = begin + SPAN if GROUPS % SPLIT == 0 else tl.minimum(begin + SPAN, GROUPS)
    row = mine * (CHUNKS * 16 * EACH) + half % 8 * EACH
    upper = _offsets(scales, zeros, row, begin, end, GROUP, CHUNKS, PADDED)
    lower = _offsets(scales, zeros, row + 8 * EACH, begin, end, GROUP, CHUNKS, PADDED)
    live = tl.minimum(first + tl.arange(0, BM), M - 1)
    x_inside = inside if GROUP == 32 else inner
    x_at = x + live.to(tl.int64)[:, None] * KP + x_inside[None, :]
    group = begin + tl.arange(0, PADDED)
    sums = tl.load(x_sums + group[:, None] * M + live[None, :], mask=(group < end)[:, None], other=0.0)
    acc = _both(tl.dot(-upper, sums, input_precision="tf32x3"), tl.dot(-lower, sums, input_precision="tf32x3"))
    for g in tl.range(begin, end, num_stages=STAGES):
        if GROUP == 32:
            w_offset, x_offset = g // 2 * 512 + g % 2 * 8, g // 2 * 64 + g % 2 * 8
        else:
            w_offset, x_offset = g * (GROUP * 8), g * GROUP
        w = tl.load(w_at + w_offset)
        xs = tl.load(x_at + x_offset)
        pair = pairs + (g // EACH * (8 * EACH) + g % EACH // 2)
        scale = _both(_scale_of(tl.load(pair), g), _scale_of(tl.load(pair + 4 * EACH), g))
        w_upper, w_lower = _nibbles(w, PLAIN)
        acc += _dot(_both(w_upper, w_lower), xs.T, PLAIN) * scale[:, None]
    acc = tl.reshape(tl.permute(tl.reshape(acc, [2, BN // 16, 8, BM]), (1, 0, 2, 3)), [BN, BM])
    acc, last = meet(acc, partial, arrived, tile * blocks + place % blocks, part, SPLIT)
    if last:
        _end(acc, out, residual, bias, tl.load(x_scales + live) / _UNIT, tile, first, M, N, BN, BM, KIND)


@triton.jit(do_not_specialize=["M"])
def fp8_rounded_kernel(
    x, x_scales, words, scales, out, residual, bias, partial, arrived, M,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for FP8 weights, ``[N, K]``; SPAN blocks of BK columns a part."""
    blocks = tl.cdiv(M, BM)
    place = tl.program_id(0)
    first = place % blocks * BM
    part = place // blocks % SPLIT
    tile = place // blocks // SPLIT
    columns, inner = tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    mine = columns if N % BN == 0 else tl.minimum(columns, N - 1)
    live = tl.minimum(first + tl.arange(0, BM), M - 1)
    w_at = words + mine.to(tl.int64)[:, None] * K + inner[None, :]
    x_at = x + live.to(tl.int64)[:, None] * K + inner[None, :]
    begin = part * SPAN
    end = tl.minimum(begin + SPAN, (K - 1) // BK + 1)
    acc = tl.zeros([BN, BM], tl.float32)
    for i in tl.range(begin, end, num_stages=STAGES):
        if K % BK == 0:
            w, xs = tl.load(w_at + i * BK), tl.load(x_at + i * BK)
        else:
            there = (i * BK + inner < K)[None, :]
            w, xs = tl.load(w_at + i * BK, mask=there, other=0.0), tl.load(x_at + i * BK, mask=there, other=0.0)
        if PLAIN:
            acc += _dot(w, xs.T, PLAIN)
        else:
            acc = tl.dot(w, xs.T, acc)
    acc, last = meet(acc, partial, arrived, tile * blocks + place % blocks, part, SPLIT)
    if last:
        acc *= tl.load(scales + columns, mask=columns < N, other=0.0)[:, None]
        _end(acc, out, residual, bias, tl.load(x_scales + live), tile, first, M, N, BN, BM, KIND)
