"""Rows as FP8 with a scale each: of activations, and of int4 weights. Both in the order of `layout`'s bytes, in which
row g of a tile and row g + 8 stand as lower and upper halves of the same bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.linear.triton import inverse_rms


@triton.jit
def _e4m3(value, PLAIN: tl.constexpr):
    """Float32 to the nearest e4m3. The interpreter loses the carry of what is rounded up to a power of two (3.6), so
    there the mantissa is rounded before."""
    if PLAIN:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(tl.float8e4nv)


@triton.jit
def _as_bytes_lie(rounded):
    """e4m3 of columns in the order of `layout`'s bytes, 64 by 64. In bits of a column's place: half, lane (two), word,
    and two in it; a byte's place: lane, half, word, and the two exchanged."""
    BLOCKS: tl.constexpr = rounded.shape[0] // 64
    split = tl.reshape(rounded.to(tl.uint8, bitcast=True), [BLOCKS, 2, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, (0, 2, 1, 3, 5, 4)), [rounded.shape[0]]).to(tl.float8e4nv, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def round_rows_kernel(
    x, gain, out, scales, sums, eps, inverse_width, M,
    K: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its norm where there is a ``gain``, and its values by the largest. With GROUP columns are put in the
    order of int4 bytes, and the rounded values of each group are summed where ``sums`` takes them."""
    KP: tl.constexpr = K if GROUP == 0 else (K - 1) // 64 * 64 + 64
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BK)
    there = column < K
    if gain is not None:
        gains = tl.load(gain + column, mask=there, other=0.0).to(tl.float32)
    value = tl.load(x + row * K + column, mask=there, other=0.0).to(tl.float32)
    if gain is not None:
        value *= inverse_rms(tl.sum(value * value, 0) * inverse_width + eps) * gains
    # A row of zeros has any scale; one that is not finite stays so.
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / MOST
    rounded = _e4m3(value * (1.0 / scale), PLAIN)
    tl.store(scales + row, scale)
    if GROUP != 0:
        if sums is not None:
            group = tl.arange(0, BK // GROUP)
            total = tl.sum(tl.reshape(rounded.to(tl.float32), [BK // GROUP, GROUP]), 1)
            tl.store(sums + group * M + row, total, mask=group < K // GROUP)
        rounded = _as_bytes_lie(rounded)
    tl.store(out + row * KP + column, rounded, mask=column < KP)


@triton.jit
def int4_to_fp8_kernel(
    words, scales, zeros, row_scales, out, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    CHUNKS: tl.constexpr, EACH: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH chunks of one tile, 16 rows of 256 columns each; a byte stays where it was in its row."""
    KP: tl.constexpr = (K - 1) // 64 * 64 + 64
    SCALES: tl.constexpr = 256 // GROUP
    tile = tl.program_id(0)
    i, p = tl.arange(0, 32), tl.arange(0, 64)  # blocks of eight rows g, and their bytes
    block, g = i // 8, i % 8
    row = tile * 16 + g
    upper = 1.0 / tl.load(row_scales + row, mask=row < N, other=1.0)
    lower = 1.0 / tl.load(row_scales + row + 8, mask=row + 8 < N, other=1.0)
    for step in tl.static_range(EACH):
        chunk = tl.program_id(1) * EACH + step
        live = chunk < CHUNKS
        place = tile.to(tl.int64) * CHUNKS + chunk
        both = tl.load(words + place * 2048 + i[:, None] * 64 + p[None, :], mask=live, other=0)
        at = chunk * 256 + block[:, None] * 64 + p[None, :]
        for half in tl.static_range(2):
            mine = place * (16 * SCALES) + (g + 8 * half) * SCALES
            if GROUP == 32:
                index = mine[:, None] + (block * 2)[:, None] + (p % 16 // 8)[None, :]
            else:
                index = (mine + block * 64 // GROUP)[:, None]
            s = tl.load(scales + index, mask=live, other=0.0).to(tl.float32) * (lower if half else upper)[:, None]
            zero = 8.0 if zeros is None else tl.load(zeros + index, mask=live, other=0.0).to(tl.float32) - 128.0
            # As the lowest bits of 2^23: conversions of integers would take longer than memory does.
            nibble = (((both >> (4 * half)) & 15).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
            value = _e4m3((nibble - (8388608.0 + zero)) * s, PLAIN)
            mask = live & (row + 8 * half < N)[:, None] & (at < KP)
            tl.store(out + (row + 8 * half).to(tl.int64)[:, None] * KP + at, value, mask=mask)
