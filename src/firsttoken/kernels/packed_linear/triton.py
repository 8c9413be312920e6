"""``y = x W^T`` for 1 to 64 rows of x over packed weights: from memory to the registers of tensor instructions.

Reading W is what costs, so nothing may stand between its bytes and the product: a lane's 16 bytes are its operands
(`layout`), unpacked by a few bit operations on pairs of values (`instruction`). Neither W nor x passes through shared
memory. A warp multiplies tiles of 16 rows of W; ``KW`` warps of a program divide the columns.
W's loads run a chunk or two ahead of the products, the first before the wait for the kernel before.
"""

# ruff: noqa: RET505, SIM108 - Triton leaves out the branch not taken only when both stand in one if statement.
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - tuples grow by addition, which Triton compiles.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.linear.triton import (
    MOST_RESIDUAL,
    MOST_SQUARES,
    finish,
    load_matrix,
    load_squares,
    load_vector,
)
from firsttoken.kernels.packed_linear.instruction import (
    in_pairs,
    multiply,
    pair,
    unpack_fp8,
    unpack_int4,
    unpack_scaled,
    unpack_shifted,
    unpack_shifted_scaled,
)

# ------------------------------------------------------------------- loads


@triton.jit
def _load_words(words, at, live, MASKED: tl.constexpr):
    """16 bytes of W a lane, ``[T, 4]``; where some lanes have none, zero for those."""
    at = at[:, None] + tl.arange(0, 4)[None, :]
    if MASKED:
        return tl.load(words + at, mask=live[:, None], other=0, eviction_policy="evict_first")
    else:
        return tl.load(words + at, eviction_policy="evict_first")


@triton.jit
def _load_scales(scales, at, live, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """A row's scales (or zero points) of a chunk, two a register: 1, 2 or 4 registers."""
    out = ()
    for i in tl.static_range(128 // GROUP):
        if MASKED:
            out = out + (tl.load(scales + at + i, mask=live, other=0),)
        else:
            out = out + (tl.load(scales + at + i),)
    return out


@triton.jit
def _load_chunk(
    words, scales, zeros, tile, lane, chunk, K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a lane needs of one chunk of a tile: four times 16 bytes, and for int4 the scales of its two rows and their
    zero points, where there are any."""
    live = chunk < CHUNKS
    if FORMAT == "int4":
        at = (tile * CHUNKS + chunk) * 512 + lane * 4
        w = ()
        for block in tl.static_range(4):
            w = w + (_load_words(words, at + block * 128, live, MASKED),)
        EACH: tl.constexpr = 128 // GROUP
        place = ((tile * CHUNKS + chunk) * 16 + lane // 4) * EACH
        s = _load_scales(scales, place, live, GROUP, MASKED)
        t = _load_scales(scales, place + 8 * EACH, live, GROUP, MASKED)
        if zeros is None:
            return w, s, t, 0, 0
        else:
            y = _load_scales(zeros, place, live, GROUP, MASKED)
            return w, s, t, y, _load_scales(zeros, place + 8 * EACH, live, GROUP, MASKED)
    else:
        # 64 columns of row g, the same of row g + 8, and once more.
        column = chunk * 128 + lane % 4 * 16
        row = tile * 16 + lane // 4
        w = ()
        for i in tl.static_range(4):
            mine = row + i % 2 * 8
            if N % 16 != 0:
                mine = tl.minimum(mine, N - 1)
            place = (mine.to(tl.int64) * K + column) // 4 + i // 2 * 16
            there = live & (column + i // 2 * 64 < K)
            w = w + (_load_words(words, place, there, MASKED or K % 128 != 0),)
        return w, 0, 0, 0, 0


@triton.jit
def _load_x(x, row, column, M, K: tl.constexpr, EDGE: tl.constexpr):
    """16 bytes of a row of x a lane, ``[T, 4]``; zero beyond M and, where chunks have an EDGE, beyond K."""
    live = row < M
    if EDGE:
        live &= column < K
    at = row * (K // 2) + column // 2
    return tl.load(x + at[:, None] + tl.arange(0, 4)[None, :], mask=live[:, None], other=0)


# ---------------------------------------------------------------- products


@triton.jit
def _scale(s, t, INDEX: tl.constexpr):
    """The INDEX-th scale of rows g and g + 8, for the lane's four sums: float32 ``[T, 4]``."""
    upper, lower = pair(s[INDEX // 2])[INDEX % 2], pair(t[INDEX // 2])[INDEX % 2]
    return tl.where((tl.arange(0, 4) < 2)[None, :], upper[:, None], lower[:, None])


@triton.jit
def _twice(s, INDEX: tl.constexpr):
    """The INDEX-th scale of a row as two bfloat16, ``[T, 4]`` of the same."""
    word = s[INDEX // 2]
    if INDEX % 2:
        word = ((word >> 16) & 65535) | (word & -65536)
    else:
        word = (word & 65535) | (word << 16)
    return tl.broadcast_to(word[:, None], [word.shape[0], 4])


@triton.jit
def _of_block(s, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """A row's scales (or zero points) for the four words of a block, ``[T, 4]``: its halves are words 0, 1 and 2, 3."""
    if GROUP == 32:
        first, second = _twice(s, 2 * BLOCK), _twice(s, 2 * BLOCK + 1)
        return tl.where((tl.arange(0, 4) < 2)[None, :], first, second)
    else:
        return _twice(s, BLOCK * 64 // GROUP)


@triton.jit
def _unpacked(
    loaded, BLOCK: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, EXACT: tl.constexpr, PLAIN: tl.constexpr
):
    """Registers of W in a block of int4, for each half of its columns; scaled (and rounded) unless EXACT."""
    w, s, t, y, z = loaded
    if ZEROS:
        if EXACT:
            a = unpack_shifted(w[BLOCK], _of_block(y, BLOCK, GROUP), _of_block(z, BLOCK, GROUP), PLAIN)
            return a, a
        else:
            a = unpack_shifted_scaled(
                w[BLOCK], _of_block(y, BLOCK, GROUP), _of_block(z, BLOCK, GROUP), _of_block(s, BLOCK, GROUP),
                _of_block(t, BLOCK, GROUP), PLAIN,
            )  # fmt: skip
            return a, a
    elif EXACT:
        a = unpack_int4(w[BLOCK], PLAIN)
        return a, a
    else:
        a = unpack_scaled(w[BLOCK], _of_block(s, BLOCK, GROUP), _of_block(t, BLOCK, GROUP), PLAIN)
        return a, a


@triton.jit
def _zeros(T: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros([T, 4], tl.float32),)
    return out


@triton.jit
def _add_scaled(c, p, loaded, INDEX: tl.constexpr, TW: tl.constexpr, PARTS: tl.constexpr):
    """The sums with those of a group, times its scales."""
    out = ()
    for u in tl.static_range(TW):
        scale = _scale(loaded[u][1], loaded[u][2], INDEX)
        for part in tl.static_range(PARTS):
            out = out + (c[u * PARTS + part] + p[u * PARTS + part] * scale,)
    return out


@triton.jit
def _multiply_rows(a, xs, sums, HALF: tl.constexpr, TW: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr):
    """Half of a block, by all tiles and all rows of x."""
    out = ()
    for u in tl.static_range(TW):
        for part in tl.static_range(PARTS):
            out = out + (multiply(a[u][HALF], xs[part], sums[u * PARTS + part], HALF, PLAIN),)
    return out


@triton.jit
def _chunk_int4(
    loaded, x, lane, column, M, c, K: tl.constexpr, EDGE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    TW: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """256 columns. EXACT: a group is summed before it is scaled, else W is scaled and rounded to bfloat16, which
    needs half of the registers."""
    p = _zeros(lane.shape[0], TW * PARTS) if EXACT else c
    for block in tl.static_range(4):
        a = ()
        for u in tl.static_range(TW):
            a = a + (_unpacked(loaded[u], block, GROUP, ZEROS, EXACT, PLAIN),)
        for half in tl.static_range(2):
            xs = ()
            for part in tl.static_range(PARTS):
                at = column + block * 64 + half * 32 + lane % 4 * 8
                xs = xs + (_load_x(x, lane // 4 + part * 8, at, M, K, EDGE),)
            p = _multiply_rows(a, xs, p, half, TW, PARTS, PLAIN)
            if EXACT and (block * 64 + half * 32 + 32) % GROUP == 0:
                c = _add_scaled(c, p, loaded, (block * 64 + half * 32) // GROUP, TW, PARTS)
                p = _zeros(lane.shape[0], TW * PARTS)
    return c if EXACT else p


@triton.jit
def _chunk_fp8(
    loaded, x, lane, column, M, c, K: tl.constexpr, EDGE: tl.constexpr, TW: tl.constexpr, PARTS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """128 columns."""
    for block in tl.static_range(2):
        a = ()
        for u in tl.static_range(TW):
            a0, a2 = unpack_fp8(loaded[u][0][2 * block], PLAIN)
            a1, a3 = unpack_fp8(loaded[u][0][2 * block + 1], PLAIN)
            a = a + (((a0, a1, a2, a3), (a0, a1, a2, a3)),)
        for half in tl.static_range(2):
            xs = ()
            for part in tl.static_range(PARTS):
                at = column + block * 64 + lane % 4 * 16 + half * 8
                xs = xs + (in_pairs(_load_x(x, lane // 4 + part * 8, at, M, K, EDGE), PLAIN),)
            c = _multiply_rows(a, xs, c, half, TW, PARTS, PLAIN)
    return c


@triton.jit
def _chunk(
    loaded, x, lane, column, M, c, K: tl.constexpr, EDGE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, TW: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    if FORMAT == "int4":
        return _chunk_int4(loaded, x, lane, column, M, c, K, EDGE, GROUP, ZEROS, TW, PARTS, EXACT, PLAIN)
    else:
        return _chunk_fp8(loaded, x, lane, column, M, c, K, EDGE, TW, PARTS, PLAIN)


# --------------------------------------------------------- from lanes to a tile


@triton.jit
def _eight(c, RW: tl.constexpr, KW: tl.constexpr):
    """The lanes' sums as ``[16 RW rows of W, 8 rows of x]``, added over the warps that share a tile."""
    lanes = tl.reshape(c, [RW, KW, 8, 4, 2, 2])  # lane 4 g + t: half of the tile, row of x
    both = tl.sum(lanes, 1) if KW > 1 else tl.reshape(lanes, [RW, 8, 4, 2, 2])
    return tl.reshape(tl.permute(both, (0, 3, 1, 2, 4)), [RW * 16, 8])


@triton.jit
def _beside(a, b):
    """``[R, C]`` and ``[R, C]`` as ``[R, 2 C]``."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _wide(c, FIRST: tl.constexpr, PARTS: tl.constexpr, RW: tl.constexpr, KW: tl.constexpr):
    """``[16 RW rows of W, 8 PARTS rows of x]``."""
    if PARTS == 1:
        return _eight(c[FIRST], RW, KW)
    else:
        HALF: tl.constexpr = PARTS // 2
        return _beside(_wide(c, FIRST, HALF, RW, KW), _wide(c, FIRST + HALF, HALF, RW, KW))


@triton.jit
def _gathered(c, TW: tl.constexpr, PARTS: tl.constexpr, RW: tl.constexpr, KW: tl.constexpr):
    """``[16 RW TW, 8 PARTS]``: a warp's tiles stand RW tiles apart."""
    if TW == 1:
        return _wide(c, 0, PARTS, RW, KW)
    else:
        both = tl.join(_wide(c, 0, PARTS, RW, KW), _wide(c, PARTS, PARTS, RW, KW))
        return tl.reshape(tl.permute(both, (2, 0, 1)), [32 * RW, 8 * PARTS])


@triton.jit
def _tiles(first, TW: tl.constexpr, RW: tl.constexpr, TILES: tl.constexpr):
    """The tiles of a warp; one past the end is computed as the last, and not stored."""
    out = ()
    for u in tl.static_range(TW):
        tile = first + u * RW
        if TILES % (RW * TW) != 0:
            tile = tl.minimum(tile, TILES - 1)
        out = out + (tile,)
    return out


@triton.jit
def _load_chunks(
    words, scales, zeros, tiles, lane, chunk, K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr, TW: tl.constexpr,
):  # fmt: skip
    out = ()
    for u in tl.static_range(TW):
        out = out + (_load_chunk(words, scales, zeros, tiles[u], lane, chunk, K, N, FORMAT, GROUP, CHUNKS, MASKED),)
    return out


@triton.jit(do_not_specialize=["M"])
def packed_linear_kernel(
    x, words, scales, zeros, out, residual, bias, gain, squares_in, scaled, squares_out, best_value, best_index, eps,
    inverse_width, M,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    RW: tl.constexpr, KW: tl.constexpr, TW: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr,
    KIND: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``M <= BM`` rows, BM 8 to 64; program i computes the i-th ``RW TW`` tiles."""
    T: tl.constexpr = 32 * RW * KW
    BN: tl.constexpr = 16 * RW * TW
    PARTS: tl.constexpr = BM // 8
    EXACT: tl.constexpr = PARTS <= 2
    ZEROS: tl.constexpr = zeros is not None
    COLUMNS: tl.constexpr = 256 if FORMAT == "int4" else 128  # of a chunk
    CHUNKS: tl.constexpr = (K - 1) // COLUMNS + 1
    SPAN: tl.constexpr = (CHUNKS - 1) // KW + 1  # chunks of a warp
    MASKED: tl.constexpr = CHUNKS % KW != 0
    EDGE: tl.constexpr = MASKED or K % COLUMNS != 0
    EARLY_SQUARES: tl.constexpr = PP * BM <= MOST_SQUARES
    EARLY_RESIDUAL: tl.constexpr = BN * BM <= MOST_RESIDUAL
    place = tl.program_id(0)
    thread = tl.arange(0, T)
    lane = thread % 32
    warp = thread // 32
    tiles = _tiles(place * (RW * TW) + warp // KW, TW, RW, (N - 1) // 16 + 1)
    first = warp % KW * SPAN
    columns = place * BN + tl.arange(0, BN)
    rows = tl.arange(0, BM)
    bias_tile = load_vector(bias, columns, N, BN)
    gain_tile = load_vector(gain, columns, N, BN)
    c = _zeros(T, TW * PARTS)
    now = _load_chunks(words, scales, zeros, tiles, lane, first, K, N, FORMAT, GROUP, CHUNKS, MASKED, TW)
    if AHEAD == 2:
        then = _load_chunks(words, scales, zeros, tiles, lane, first + 1, K, N, FORMAT, GROUP, CHUNKS, MASKED, TW)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if EARLY_SQUARES:
        squares = load_squares(squares_in, rows, M, P, PP)
    if EARLY_RESIDUAL:
        residual_tile = load_matrix(residual, rows, columns, M, N)
    column = first * COLUMNS
    for i in tl.range(AHEAD, SPAN, num_stages=1):
        later = _load_chunks(words, scales, zeros, tiles, lane, first + i, K, N, FORMAT, GROUP, CHUNKS, MASKED, TW)
        c = _chunk(now, x, lane, column, M, c, K, EDGE, FORMAT, GROUP, ZEROS, TW, PARTS, EXACT, PLAIN)
        column += COLUMNS
        if AHEAD == 2:
            now, then = then, later
        else:
            now = later
    c = _chunk(now, x, lane, column, M, c, K, EDGE, FORMAT, GROUP, ZEROS, TW, PARTS, EXACT, PLAIN)
    if AHEAD == 2:
        c = _chunk(then, x, lane, column + COLUMNS, M, c, K, EDGE, FORMAT, GROUP, ZEROS, TW, PARTS, EXACT, PLAIN)
    acc = _gathered(c, TW, PARTS, RW, KW)
    if not EARLY_SQUARES:
        squares = load_squares(squares_in, rows, M, P, PP)
    if not EARLY_RESIDUAL:
        residual_tile = load_matrix(residual, rows, columns, M, N)
    if FORMAT == "fp8":
        acc *= tl.load(scales + columns, mask=columns < N, other=0.0)[:, None]
    finish(
        acc, out, residual_tile, bias_tile, gain_tile, squares, scaled, squares_out, best_value, best_index,
        eps, inverse_width, M, place, tl.num_programs(0), N, BN, BM, KIND,
    )  # fmt: skip
