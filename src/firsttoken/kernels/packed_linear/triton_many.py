"""Rows as FP8 with a scale each: of activations, and of int4 weights."""

from __future__ import annotations

import triton
import triton.language as tl


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
def quantize_rows_kernel(
    x, out, scales, K: tl.constexpr, BK: tl.constexpr, MOST: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BK)
    value = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    # A row of zeros has any scale; one that is not finite stays so.
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / MOST
    tl.store(out + row * K + columns, _e4m3(value / scale, PLAIN), mask=columns < K)
    tl.store(scales + row, scale)


@triton.jit
def _four_columns(word, scale, zero, HALF: tl.constexpr, PLAIN: tl.constexpr):
    """A lane's four columns of row g (HALF 0) or g + 8 of one instruction, as the bytes of a word."""
    bytes4 = tl.zeros_like(word)
    for i in tl.static_range(4):
        # Columns 0 and 1 are the first pair's two halves of the word, 2 and 3 the second pair's.
        nibble = (word >> (4 * HALF + 8 * (i // 2) + 16 * (i % 2))) & 15
        value = (nibble.to(tl.float32) - zero) * scale
        bits = _e4m3(value, PLAIN).to(tl.uint8, bitcast=True).to(tl.int32)
        bytes4 |= bits << (8 * i)
    return bytes4


@triton.jit
def int4_to_fp8_kernel(
    words, scales, zeros, row_scales, out, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
    PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one tile: 512 words, 16 rows of 256 columns."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, 512)
    block, lane, j = i // 128, i % 128 // 4, i % 4
    place = tile.to(tl.int64) * CHUNKS + chunk
    word = tl.load(words + place * 512 + i)
    inside = block * 64 + j // 2 * 32 + lane % 4 * 8 + j % 2 * 4
    column = chunk * 256 + inside
    for half in tl.static_range(2):
        local = lane // 4 + 8 * half
        row = tile * 16 + local
        there = (row < N) & (column < K)
        group = place * (16 * (256 // GROUP)) + local * (256 // GROUP) + inside // GROUP
        scale = tl.load(scales + group).to(tl.float32)
        zero = 8.0
        if zeros is not None:
            zero = tl.load(zeros + group).to(tl.float32) - 128
        scale /= tl.load(row_scales + row, mask=row < N, other=1.0)
        bytes4 = _four_columns(word, scale, zero, half, PLAIN)
        tl.store(out + (row.to(tl.int64) * K + column) // 4, bytes4, mask=there)
