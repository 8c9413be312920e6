"""int4 weights by FP8 rows in large tiles: what the present kernel waits for is the second-level cache.

At 256 rows its programs (128 rows of W, 64 of x) read 16 KiB for 2^20 products: for a product of 57,344 x 8,192 1.88
GB, in the 347 us that it takes 5.4 TB/s, which is what that cache gives. By count, for each multiprocessor, whose
tensor cores do 4,096 products a clock and to which the cache sends some 25 bytes:

| tile (W x x) | bytes a clock at full rate | of the rate by the cache | instructions of tensor time (4 a clock) |
|---|---|---|---|
| 128 x 64, as it is | 64 | 39 % | 91 % |
| 128 x 128 | 48 | 52 % | 70 % |
| 128 x 256 | 40 | 63 % | 60 % |
| 256 x 128 | 32 | 78 % | 62 % |

torch's FP8 products reach 66 %. So many sums fill the registers (128 of a thread's 255), and products of a group are
summed apart before they are scaled: there is room for those of 128 x 128 (64 registers) alone. A tile is therefore
multiplied in pieces, W's unpacked once for all pieces of x. While a piece's sums are scaled the next piece's are
computed, and the other four warps' beside them: compiled for sm_90, a piece's first product is issued before the
scaling of the last one (300 instructions for 8 of the tensor cores', of 128 columns each, and no register spilled).
Rows of a tile of W stay in their own order, so both halves of a byte are one thread's, whichever group of warps it is
in, and nothing goes through shared memory.

What zero points add is taken off afterwards by two products of bfloat16 halves, which hold 16 bits of the sums of x:
the present kernel's three of tf32 cost as much as another tenth of the whole.

Tiles that do not fill a last wave of programs divide their columns (`Division`).
"""

# ruff: noqa: RET505, SIM102 - Triton leaves out the branch not taken only when both stand in one if statement.
# ruff: noqa: RUF005 - tuples grow by addition, which Triton compiles.
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.linear.triton import meet
from firsttoken.kernels.packed_linear.triton_rounded import _dot, _end, _nibbles, _offsets, _scale_of

_UNIT = tl.constexpr(2.0**-9)  # an e4m3 of 1 in its lowest bit
_SUMMED = tl.constexpr(32)  # groups whose sums are taken off at once


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
def _halves(value):
    """float32 as two bfloat16 whose sum holds 16 of its bits."""
    high = value.to(tl.bfloat16)
    return high, (value - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _take_off(acc, offsets, sums, ZEROS: tl.constexpr, PLAIN: tl.constexpr):
    """``acc`` less ``offsets [rows, groups] sums [groups, PM]``. Without zero points offsets are bfloat16 already."""
    high, low = _halves(sums)
    first, rest = _halves(offsets)
    acc -= _dot(first, low, PLAIN)
    acc -= _dot(first, high, PLAIN)
    if ZEROS:
        acc -= _dot(rest, high, PLAIN)
    return acc


@triton.jit
def _live(first, M, PM: tl.constexpr):
    """Rows of x of a piece; what is beyond the last is computed as the last, and not stored."""
    return tl.minimum(first + tl.arange(0, PM), M - 1)


@triton.jit
def _without_zero_points(
    acc, x_sums, scales, zeros, piece, first, begin, end, M, TILES: tl.constexpr, GROUP: tl.constexpr,
    CHUNKS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """A piece's sums less what the zero points of groups ``begin`` to ``end`` add."""
    EACH: tl.constexpr = 256 // GROUP
    row = tl.arange(0, acc.shape[0])
    mine = tl.minimum(piece * (acc.shape[0] // 16) + row // 16, TILES - 1)
    place = mine * (CHUNKS * 16 * EACH) + row % 16 * EACH
    live = _live(first, M, acc.shape[1])
    for g in tl.range(begin, end, _SUMMED, num_stages=1):
        group = g + tl.arange(0, _SUMMED)
        offsets = _offsets(scales, zeros, place, g, end, GROUP, CHUNKS, _SUMMED)
        sums = tl.load(x_sums + group[:, None] * M + live[None, :], mask=(group < end)[:, None], other=0.0)
        acc = _take_off(acc, offsets, sums, zeros is not None, PLAIN)
    return acc


@triton.jit(do_not_specialize=["M", "WHOLE"])
def wide_int4_kernel(
    x, x_scales, x_sums, words, scales, zeros, out, residual, bias, partial, arrived, M, WHOLE,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, TALL: tl.constexpr,
    PN: tl.constexpr, PM: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile is TALL pieces of PN rows of W by WIDE pieces of PM rows of x. Neighbouring programs share W. The first
    WHOLE tiles have a program each, the others SPLIT."""
    KP: tl.constexpr = (K - 1) // 64 * 64 + 64
    GROUPS: tl.constexpr = K // GROUP
    EACH: tl.constexpr = 256 // GROUP
    TILES: tl.constexpr = (N - 1) // 16 + 1
    SPAN: tl.constexpr = (GROUPS - 1) // SPLIT + 1
    BM: tl.constexpr = WIDE * PM
    blocks = tl.cdiv(M, BM)
    place = tl.program_id(0)
    whole = place < WHOLE
    index = tl.where(whole, place, WHOLE + (place - WHOLE) // SPLIT)
    part = tl.where(whole, 0, (place - WHOLE) % SPLIT)
    begin = part * SPAN
    end = tl.where(whole, GROUPS, tl.minimum(begin + SPAN, GROUPS))
    first = index % blocks * BM
    tile = index // blocks
    half, inner = tl.arange(0, PN // 2), tl.arange(0, GROUP)
    inside = inner // 64 * 512 + inner % 64
    w_at, pairs, acc = (), (), ()
    for q in tl.static_range(TALL):
        mine = (tile * TALL + q) * (PN // 16) + half // 8
        if TILES % (TALL * PN // 16) != 0:
            mine = tl.minimum(mine, TILES - 1)
        w_at = w_at + (words + (mine.to(tl.int64) * (CHUNKS * 2048) + half % 8 * 64)[:, None] + inside[None, :],)
        pair = mine * (CHUNKS * 8 * EACH) + half % 8 * (EACH // 2)
        pairs = pairs + (scales.to(tl.pointer_type(tl.int32)) + pair,)
        for _ in tl.static_range(WIDE):
            acc = acc + (tl.zeros([PN, PM], tl.float32),)
    x_at = x + (first + tl.arange(0, PM)).to(tl.int64)[:, None] * KP + inner[None, :]
    for g in tl.range(begin, end, num_stages=STAGES):
        ws, xs, ss, more = (), (), (), ()
        for q in tl.static_range(TALL):
            ws = ws + (tl.load(w_at[q] + g * (GROUP * 8)),)
            scale_at = pairs[q] + (g // EACH * (8 * EACH) + g % EACH // 2)
            ss = ss + (_rows(_scale_of(tl.load(scale_at), g), _scale_of(tl.load(scale_at + 4 * EACH), g)),)
        for p in tl.static_range(WIDE):
            xs = xs + (tl.load(x_at + (p * PM * KP + g * GROUP)),)
        for q in tl.static_range(TALL):
            upper, lower = _nibbles(ws[q], PLAIN)
            w = _rows(upper, lower)
            for p in tl.static_range(WIDE):
                more = more + (acc[q * WIDE + p] + _dot(w, xs[p].T, PLAIN) * ss[q][:, None],)
        acc = more
    for q in tl.static_range(TALL):
        for p in tl.static_range(WIDE):
            piece = _without_zero_points(
                acc[q * WIDE + p], x_sums, scales, zeros, tile * TALL + q, first + p * PM, begin, end, M, TILES,
                GROUP, CHUNKS, PLAIN,
            )  # fmt: skip
            last = True
            if SPLIT > 1:
                if not whole:
                    slot = ((index - WHOLE) * TALL + q) * WIDE + p
                    piece, last = meet(piece, partial, arrived, slot, part, SPLIT)
            if last and first + p * PM < M:
                scale = tl.load(x_scales + _live(first + p * PM, M, PM)) / _UNIT
                _end(piece, out, residual, bias, scale, tile * TALL + q, first + p * PM, M, N, PN, PM, KIND)
