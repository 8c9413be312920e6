"""int4 weights by FP8 rows in wide tiles, for prompts: weights are scaled as they are unpacked.

A nibble times its group's scale is rounded to e4m3, as `int4_to_fp8_kernel` would write it, in the registers from which
the tensor cores take it. So all of K is summed in them, and 128 rows of W by 256 of x need no sums beside: each weight
is unpacked once for 256 rows. Sums that are scaled by group outside leave room for half of that, and to read, scale and
add them costs what the tensor cores' work does.

Tiles that do not fill a last wave of programs divide their columns (`WideDivision`).
"""

# ruff: noqa: RET505, SIM102 - Triton leaves out the branch not taken only when both stand in one if statement.
from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.packed_linear.triton_rounded import _dot, _end
from firsttoken.kernels.packed_linear.triton_rows import _e4m3

# A nibble as the upper bits of a half's mantissa is 16 to 31; times the scale, less (16 + zero point) times the scale,
# it is the weight. Halves hold bytes 0 and 2, 1 and 3. The scale has 8 bits, so without zero points that is exact.
_SCALED = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    .reg .b16 p, q;
    shl.b32 a, $2, 6;
    shr.u32 b, $2, 2;
    shl.b32 c, $2, 2;
    shr.u32 d, $2, 6;
    lop3.b32 a, a, 0x03c003c0, 0x4c004c00, 0xea;
    lop3.b32 b, b, 0x03c003c0, 0x4c004c00, 0xea;
    lop3.b32 c, c, 0x03c003c0, 0x4c004c00, 0xea;
    lop3.b32 d, d, 0x03c003c0, 0x4c004c00, 0xea;
    fma.rn.f16x2 a, a, $3, $7;
    fma.rn.f16x2 b, b, $3, $7;
    fma.rn.f16x2 c, c, $11, $15;
    fma.rn.f16x2 d, d, $11, $15;
    cvt.rn.satfinite.e4m3x2.f16x2 p, a;
    cvt.rn.satfinite.e4m3x2.f16x2 q, b;
    mov.b32 a, {p, q};
    prmt.b32 $0, a, 0, 0x3120;
    cvt.rn.satfinite.e4m3x2.f16x2 p, c;
    cvt.rn.satfinite.e4m3x2.f16x2 q, d;
    mov.b32 c, {p, q};
    prmt.b32 $1, c, 0, 0x3120;
}""")
_MASKS = tl.constexpr("=&r,=&r,r" + 16 * ",r")


@triton.jit
def _groups(pairs):
    """``[rows, pairs]`` of two bfloat16 in int32 as float32 ``[rows, groups]``. Loaded alone they would be too short to
    be copied ahead."""
    GROUPS: tl.constexpr = 2 * pairs.shape[1]
    first, second = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(first, second), [pairs.shape[0], GROUPS])


@triton.jit
def _spread(values):
    """``[rows, groups]`` for each of the groups' columns, ``[rows, 256]``."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, GROUPS, 256 // GROUPS]), [ROWS, 256])


@triton.jit
def _eight_bits(value, PLAIN: tl.constexpr):
    """Float32 rounded to what bfloat16 holds, which the interpreter would cut off."""
    if PLAIN:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _twice(half):
    """A half's bits in both halves of int32."""
    bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _less(scale, points):
    """16 and the zero point, which is 8 where there are no ``points``, times the scale: what is too much, negated."""
    if points is None:
        return scale * -24.0
    else:
        return scale * (112.0 - _groups(tl.load(points)))


@triton.jit
def _weights(w, upper, lower, upper_less, lower_less, PLAIN: tl.constexpr):
    """Bytes ``[rows, 256]`` as e4m3: their lower halves scaled by ``upper [rows, groups]``, and their upper ones."""
    if PLAIN:
        first = ((w & 15).to(tl.float32) + 16.0) * _spread(upper) + _spread(upper_less)
        second = ((w >> 4).to(tl.float32) + 16.0) * _spread(lower) + _spread(lower_less)
        return _e4m3(first, True), _e4m3(second, True)
    else:
        factors = (_spread(_twice(upper.to(tl.float16))), _spread(_twice(upper_less.to(tl.float16))))
        others = (_spread(_twice(lower.to(tl.float16))), _spread(_twice(lower_less.to(tl.float16))))
        first, second = tl.inline_asm_elementwise(
            _SCALED, _MASKS, [w, factors[0], factors[1], others[0], others[1]], dtype=(tl.uint8, tl.uint8),
            is_pure=True, pack=4,
        )  # fmt: skip
        return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _rows(upper, lower):
    """Rows g and rows g + 8 of tiles, ``[8 T, ..]`` each, in the tiles' own order."""
    TILES: tl.constexpr = upper.shape[0] // 8
    if len(upper.shape) == 1:
        return tl.reshape(tl.permute(tl.reshape(tl.join(upper, lower), [TILES, 8, 2]), (0, 2, 1)), [TILES * 16])
    else:
        COLUMNS: tl.constexpr = upper.shape[1]
        both = tl.reshape(tl.join(upper, lower), [TILES, 8, COLUMNS, 2])
        return tl.reshape(tl.permute(both, (0, 3, 1, 2)), [TILES * 16, COLUMNS])


@triton.jit
def _meet(acc, partial, arrived, slot, part, split, MOST: tl.constexpr):
    """As `meet`, of as many programs as are told when it runs, MOST at most. In a loop that is not unrolled the sums
    would make ptxas wait for each of the tensor cores' instructions."""
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    place = partial + slot * (split * BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(place + part * (BN * BM), acc)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + slot, 1, sem="acq_rel", scope="gpu") == split - 1
    if last:
        tl.store(arrived + slot, 0)
        if MOST == 2:  # the same bits whoever is last
            acc += tl.load(place + (1 - part) * (BN * BM), cache_modifier=".cg")
        else:
            acc = tl.zeros([BN, BM], tl.float32)
            for s in tl.static_range(MOST):
                acc += tl.load(place + s * (BN * BM), mask=s < split, other=0.0, cache_modifier=".cg")
    return acc, last


@triton.jit(do_not_specialize=["M", "whole", "split"])
def int4_wide_kernel(
    x, x_scales, words, scales, zeros, row_scales, out, residual, bias, partial, arrived, M, whole, split,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    MOST: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first ``whole`` tiles of BN rows of W and BM of x have a program each, the others ``split``. Neighbours share
    W. Rows of x are there up to a multiple of BM."""
    KP: tl.constexpr = (K - 1) // 64 * 64 + 64
    EACH: tl.constexpr = 256 // GROUP
    TILES: tl.constexpr = (N - 1) // 16 + 1
    blocks = tl.cdiv(M, BM)
    index = tl.program_id(0)
    begin, end, part = 0, CHUNKS, 0
    if MOST > 1:
        if index >= whole:
            part = (index - whole) % split
            index = whole + (index - whole) // split
            span = tl.cdiv(CHUNKS, split)
            begin = part * span
            end = tl.minimum(begin + span, CHUNKS)
    first = index % blocks * BM
    tile = index // blocks
    half, inner = tl.arange(0, BN // 2), tl.arange(0, 256)
    mine = tile * (BN // 16) + half // 8
    if TILES % (BN // 16) != 0:
        mine = tl.minimum(mine, TILES - 1)
    inside = inner // 64 * 512 + inner % 64
    w_at = words + (mine.to(tl.int64) * (CHUNKS * 2048) + half % 8 * 64)[:, None] + inside[None, :]
    pair = (mine * (CHUNKS * 8 * EACH) + half % 8 * (EACH // 2))[:, None] + tl.arange(0, EACH // 2)[None, :]
    pairs = scales.to(tl.pointer_type(tl.int32)) + pair
    row = mine * 16 + half % 8
    upper = 1.0 / tl.load(row_scales + row, mask=row < N, other=1.0)[:, None]
    lower = 1.0 / tl.load(row_scales + row + 8, mask=row + 8 < N, other=1.0)[:, None]
    points = None if zeros is None else zeros.to(tl.pointer_type(tl.int32)) + pair
    x_at = x + (first + tl.arange(0, BM)).to(tl.int64)[:, None] * KP + inner[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    # A chunk at a time, so that its later columns are unpacked beside the products of its first, and the next chunk's
    # first beside its last.
    for c in tl.range(begin, end, num_stages=STAGES):
        w = tl.load(w_at + c * 2048)
        if K % 256 == 0:
            xs = tl.load(x_at + c * 256)
        else:
            xs = tl.load(x_at + c * 256, mask=(c * 256 + inner < K)[None, :], other=0.0)
        at, below = c * (8 * EACH), c * (8 * EACH) + 4 * EACH
        upper_scales = _eight_bits(_groups(tl.load(pairs + at)) * upper, PLAIN)
        lower_scales = _eight_bits(_groups(tl.load(pairs + below)) * lower, PLAIN)
        upper_less = _less(upper_scales, None if zeros is None else points + at)
        lower_less = _less(lower_scales, None if zeros is None else points + below)
        first_w, second_w = _weights(w, upper_scales, lower_scales, upper_less, lower_less, PLAIN)
        if PLAIN:
            acc += _dot(_rows(first_w, second_w), xs.T, PLAIN)
        else:
            acc = tl.dot(_rows(first_w, second_w), xs.T, acc)
    last = True
    if MOST > 1:
        if tl.program_id(0) >= whole:
            acc, last = _meet(acc, partial, arrived, index - whole, part, split, MOST)
    if last:
        column = tile * BN + tl.arange(0, BN)
        acc *= tl.load(row_scales + column, mask=column < N, other=0.0)[:, None]
        live = tl.minimum(first + tl.arange(0, BM), M - 1)
        _end(acc, out, residual, bias, tl.load(x_scales + live), tile, first, M, N, BN, BM, KIND)
