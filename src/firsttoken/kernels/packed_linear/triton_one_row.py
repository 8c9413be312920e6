"""FP8 weights by one row of bfloat16 on the CUDA cores: `fma_linear`'s loop, with a scale a row of W at its end.

Tensor instructions take eight rows: for one they read x eight times. In an 8B's decode graph on an H200 the head, gate
and up, and down are faster so, the others not (`benchmarks.gpu.tune --quantization fp8`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.linear.triton import (
    _load_columns,
    _load_weights,
    _weight_rows,
    finish,
    load_matrix,
    load_squares,
    load_vector,
)


@triton.jit
def fp8_row_kernel(
    x, w, scales, out, residual, bias, gain, squares_in, scaled, squares_out, best_value, best_index, eps,
    inverse_width,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes BN columns of the result. STAGES 0 holds the next block in registers, others are copies."""
    LAST: tl.constexpr = (K - 1) // BK * BK
    tile = tl.program_id(0)
    first = tile * BN
    columns = first + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    row = tl.arange(0, 1)
    weights = _weight_rows(w, first, columns, inner, N, K, BN)
    scale = load_vector(scales, columns, N, BN)
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
            acc += present.to(tl.float32) * tl.load(x + k - BK + inner).to(tl.float32)[None, :]
            present = following
        acc += present.to(tl.float32) * _load_columns(x, LAST, inner, K, BK).to(tl.float32)[None, :]
    else:
        for k in tl.range(0, K, BK, num_stages=STAGES):
            present = _load_weights(weights, k, inner, K, BK)
            acc += present.to(tl.float32) * _load_columns(x, k, inner, K, BK).to(tl.float32)[None, :]
    finish(
        tl.sum(acc, 1)[:, None] * scale, out, residual_tile, bias_tile, gain_tile, squares, scaled, squares_out,
        best_value, best_index, eps, inverse_width, 1, tile, tl.num_programs(0), N, BN, 1, KIND,
    )  # fmt: skip
