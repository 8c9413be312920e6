"""Two kernels for ``y = x W^T`` with 1 to 64 rows of x, where reading W is most of what costs.

`fma_linear` (one row) multiplies on the CUDA cores; `dot_linear` (2 to 64 rows) gives W to the tensor cores as the tall
operand, so that 8 to 64 rows of x fill the narrow one ("swap AB"), and may split K over several programs.

Under programmatic dependent launch both read their first weights before they wait for the kernel before them, and
everything that kernel may have written right after: what the epilogue needs is then there when the loop ends, as far
as registers can hold it.
"""

# ruff: noqa: RET505 - Triton leaves out the branch not taken only when both stand in one if statement.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Partial sums of squares, and elements of the residual, that a program keeps in registers during its loop.
MOST_SQUARES = tl.constexpr(4096)
MOST_RESIDUAL = tl.constexpr(4096)


@triton.jit
def _ordered(bits):
    """float32 as bits <-> integers in the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(acc, columns):
    """The largest of ``acc [columns, rows]`` and its column for each row: NaN above all, the lowest column at ties.

    Value and column go through the reduction as one integer, the value's bits above those of the column's complement.
    """
    # Both zeros are equal, and all NaN too: one of a positive sign lies above infinity.
    bits = tl.where(acc == 0.0, 0, tl.where(acc != acc, 0x7FC00000, acc.to(tl.int32, bitcast=True)))
    high = _ordered(bits).to(tl.int64)
    top = tl.max((high << 32) | (0x7FFFFFFF - columns).to(tl.int64), 0)
    value = _ordered((top >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    return value, 0x7FFFFFFF - top.to(tl.int32)


@triton.jit
def _weight_rows(w, first, rows, columns, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    """Pointers of the tile's first K block. Rows beyond N read row N - 1 again: no mask in the loop."""
    offsets = rows - first if N % BN == 0 else tl.minimum(rows, N - 1) - first
    return w + first.to(tl.int64) * K + offsets[:, None] * K + columns[None, :]


@triton.jit
def _load_weights(tile, k, columns, K: tl.constexpr, BK: tl.constexpr):
    if K % BK == 0:
        return tl.load(tile + k, eviction_policy="evict_first")
    else:
        return tl.load(tile + k, mask=(columns + k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_columns(x, k, columns, K: tl.constexpr, BK: tl.constexpr):
    """``x[k + columns]`` of one row, zero beyond K."""
    if K % BK == 0:
        return tl.load(x + k + columns)
    else:
        return tl.load(x + k + columns, mask=columns + k < K, other=0.0)


@triton.jit
def load_vector(vector, columns, N: tl.constexpr, BN: tl.constexpr):
    """A float32 column of ``vector [N]``, or 0 where there is none."""
    if vector is None:
        return 0.0
    elif N % BN == 0:
        return tl.load(vector + columns)[:, None].to(tl.float32)
    else:
        return tl.load(vector + columns, mask=columns < N, other=0.0)[:, None].to(tl.float32)


@triton.jit
def load_matrix(matrix, rows, columns, M, N: tl.constexpr):
    """``matrix[rows, columns]`` as ``[columns, rows]``, or 0 where there is none."""
    if matrix is None:
        return 0.0
    else:
        mask = (rows[None, :] < M) & (columns[:, None] < N)
        return tl.load(matrix + rows[None, :] * N + columns[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_squares(squares, rows, M, P: tl.constexpr, PP: tl.constexpr):
    """The partial sums of squares ``[rows, WIDE]``, zero beyond P and M, or 0 where there are none.

    Where ``[rows, PP]`` would be too much for the registers, parts WIDE apart are added already.
    """
    WIDE: tl.constexpr = PP if PP * rows.shape[0] <= MOST_SQUARES else MOST_SQUARES // rows.shape[0]
    if squares is None:
        return 0.0
    else:
        parts = tl.arange(0, WIDE)
        live = rows[:, None] < M
        at = squares + rows[:, None] * P + parts[None, :]
        total = tl.load(at, mask=live & (parts[None, :] < P), other=0.0)
        for first in tl.static_range(WIDE, PP, WIDE):
            total += tl.load(at + first, mask=live & (parts[None, :] + first < P), other=0.0)
        return total


@triton.jit
def inverse_rms(mean):
    """``1 / sqrt(mean)``, but NaN where the squares overflow: 0 would make a row of finite values look like nothing."""
    return tl.where(mean == float("inf"), float("nan"), tl.rsqrt(mean))


@triton.jit
def finish(
    acc, out, residual, bias, gain, squares, scaled, squares_out, best_value, best_index, eps, inverse_width, M,
    tile, tiles, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Norm, bias and the epilogue ``KIND`` on ``acc [BN, BM]``, the sums of one of ``tiles`` tiles; ``residual``,
    ``bias``, ``gain`` and ``squares`` are tiles that were loaded early."""
    rows = tl.arange(0, BM)
    columns = tile * BN + tl.arange(0, BN)
    live = rows < M
    mask = live[None, :] & (columns[:, None] < N)
    at = rows[None, :] * N + columns[:, None]
    if inverse_width is not None:
        acc *= inverse_rms(tl.sum(squares, 1) * inverse_width + eps)[None, :]
    acc += bias
    if KIND == "gated":
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BN // 2, 2, BM]), (0, 2, 1)))
        half = tile * (BN // 2) + tl.arange(0, BN // 2)
        value = gate / (1.0 + tl.exp(-gate)) * up
        mask = live[None, :] & (half[:, None] < N // 2)
        tl.store(out + rows[None, :] * (N // 2) + half[:, None], value.to(out.dtype.element_ty), mask=mask)
    elif KIND == "head":
        tl.store(out + at, acc, mask=mask)
        value, index = _best(tl.where(columns[:, None] < N, acc, -float("inf")), columns[:, None])
        tl.store(best_value + rows * tiles + tile, value, mask=live)
        tl.store(best_index + rows * tiles + tile, index, mask=live)
    else:
        acc += residual
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
        if scaled is not None:
            tl.store(scaled + at, (acc * gain).to(scaled.dtype.element_ty), mask=mask)
            own = tl.where(columns[:, None] < N, acc, 0.0)
            tl.store(squares_out + rows * tiles + tile, tl.sum(own * own, 0), mask=live)


@triton.jit
def fma_linear(
    x, w, out, residual, bias, gain, squares_in, scaled, squares_out, best_value, best_index, eps, inverse_width,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. STAGES 0: the tile after the present one is in registers; else Triton's asynchronous copies."""
    LAST: tl.constexpr = (K - 1) // BK * BK
    tile = tl.program_id(0)
    first = tile * BN
    columns = first + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    row = tl.arange(0, 1)
    weights = _weight_rows(w, first, columns, inner, N, K, BN)
    bias_tile = load_vector(bias, columns, N, BN)
    gain_tile = load_vector(gain, columns, N, BN)
    acc = tl.zeros([BN, BK], tl.float32)
    if STAGES == 0:
        present = _load_weights(weights, 0, inner, K, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = load_squares(squares_in, row, 1, P, PP)
    residual_tile = load_matrix(residual, row, columns, 1, N)
    if STAGES == 0:
        for k in range(BK, LAST + 1, BK):
            following = _load_weights(weights, k, inner, K, BK)
            # Only the last block can reach beyond K, and this is the one before it.
            acc += present.to(tl.float32) * tl.load(x + k - BK + inner).to(tl.float32)[None, :]
            present = following
        acc += present.to(tl.float32) * _load_columns(x, LAST, inner, K, BK).to(tl.float32)[None, :]
    else:
        for k in tl.range(0, K, BK, num_stages=STAGES):
            present = _load_weights(weights, k, inner, K, BK)
            acc += present.to(tl.float32) * _load_columns(x, k, inner, K, BK).to(tl.float32)[None, :]
    finish(
        tl.sum(acc, 1)[:, None], out, residual_tile, bias_tile, gain_tile, squares, scaled, squares_out,
        best_value, best_index, eps, inverse_width, 1, tile, tl.num_programs(0), N, BN, 1, KIND,
    )  # fmt: skip


@triton.jit
def _dot(w, x, acc, UPCAST: tl.constexpr):
    """``acc + w x``; the interpreter's dot knows no bfloat16."""
    if UPCAST:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
    else:
        return tl.dot(w, x, acc)


@triton.jit
def _load_x(x, k, rows, inner, M, K: tl.constexpr, BK: tl.constexpr):
    """``x[rows, k + inner]`` as ``[BK, BM]``, zero beyond M and K."""
    mask = rows[None, :] < M
    if K % BK != 0:
        mask &= (inner + k < K)[:, None]
    return tl.load(x + rows[None, :] * K + inner[:, None] + k, mask=mask, other=0.0)


@triton.jit
def meet(acc, partial, arrived, slot, part, SPLIT: tl.constexpr):
    """The sums of all programs that share tile ``slot``, and whether this is the last of them, who goes on.

    They leave their parts in ``partial [slots, SPLIT, BN, BM]``; the last to arrive (counted in ``arrived [slots]``,
    which it sets back to 0) adds them in the order of the parts: the same bits whoever is last.
    """
    last = True
    if SPLIT > 1:
        BN: tl.constexpr = acc.shape[0]
        BM: tl.constexpr = acc.shape[1]
        place = partial + slot * (SPLIT * BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(place + part * (BN * BM), acc)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + slot, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            tl.store(arrived + slot, 0)
            acc = tl.zeros([BN, BM], tl.float32)
            for s in tl.static_range(SPLIT):
                acc += tl.load(place + s * (BN * BM), cache_modifier=".cg")
    return acc, last


@triton.jit(do_not_specialize=["M"])
def dot_linear(
    x, w, out, residual, bias, gain, squares_in, scaled, squares_out, best_value, best_index, partial, arrived,
    eps, inverse_width, M,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, KIND: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``M <= BM`` rows; program (i, s) computes part s of K for the i-th BN columns of the result (`meet`)."""
    SPAN: tl.constexpr = ((K - 1) // BK // SPLIT + 1) * BK
    # Many rows' sums fill the registers: what only the last program's epilogue needs is then read at the end.
    EARLY_SQUARES: tl.constexpr = PP * BM <= MOST_SQUARES
    EARLY_RESIDUAL: tl.constexpr = BN * BM <= MOST_RESIDUAL
    # Few rows multiply the prefetched weights first. With many, reading x for that would hold the copies up.
    FIRST: tl.constexpr = PREFETCH and BM <= 16
    tile, part = tl.program_id(0), tl.program_id(1)
    first = tile * BN
    columns = first + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    rows = tl.arange(0, BM)
    weights = _weight_rows(w, first, columns, inner, N, K, BN)
    bias_tile = load_vector(bias, columns, N, BN)
    gain_tile = load_vector(gain, columns, N, BN)
    acc = tl.zeros([BN, BM], tl.float32)
    begin = part * SPAN
    if PREFETCH:
        present = _load_weights(weights, begin, inner, K, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if EARLY_SQUARES:
        squares = load_squares(squares_in, rows, M, P, PP)
    if EARLY_RESIDUAL:
        residual_tile = load_matrix(residual, rows, columns, M, N)
    start = begin + BK if PREFETCH else begin
    if FIRST:
        acc = _dot(present, _load_x(x, begin, rows, inner, M, K, BK), acc, UPCAST)
    # A constant number of rounds where the parts are equal: the compiler then knows the loop's length.
    stop = begin + SPAN if K % (SPLIT * BK) == 0 else tl.minimum(begin + SPAN, K)
    for k in tl.range(start, stop, BK, num_stages=STAGES):
        block = _load_weights(weights, k, inner, K, BK)
        acc = _dot(block, _load_x(x, k, rows, inner, M, K, BK), acc, UPCAST)
    if PREFETCH and not FIRST:
        acc = _dot(present, _load_x(x, begin, rows, inner, M, K, BK), acc, UPCAST)
    acc, last = meet(acc, partial, arrived, tile, part, SPLIT)
    if last:
        if not EARLY_SQUARES:
            squares = load_squares(squares_in, rows, M, P, PP)
        if not EARLY_RESIDUAL:
            residual_tile = load_matrix(residual, rows, columns, M, N)
        finish(
            acc, out, residual_tile, bias_tile, gain_tile, squares, scaled, squares_out, best_value, best_index,
            eps, inverse_width, M, tile, tl.num_programs(0), N, BN, BM, KIND,
        )  # fmt: skip
