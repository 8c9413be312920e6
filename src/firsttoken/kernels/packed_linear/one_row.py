"""`packed_linear` for one row and FP8 weights, on the CUDA cores; imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.linear.config import LinearConfig, OpKind
from firsttoken.kernels.linear.small import Norm, check_epilogue, expect
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.packed_linear.triton_one_row import fp8_row_kernel


def fp8_row_linear(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    *,
    config: LinearConfig,
    pdl: bool = False,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    next_gain: Tensor | None = None,
    scaled_out: Tensor | None = None,
    ssq_out: Tensor | None = None,
    best: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `packed_linear`. Raises `ConfigError` for another config or other weights, ValueError for tensors that do not
    fit."""
    kind: OpKind = "gated" if gated else "head" if best is not None else "plain" if residual is None else "residual"
    (m, k), n = x.shape, weight.n
    if weight.format != "fp8" or config.kernel != "fma" or m != 1:
        raise ConfigError(
            f"one row of FP8 weights by an fma config is what this takes, got {m} rows, {weight.format} and {config}"
        )
    config.check(kind, n, k)
    expect("x", x, (1, weight.k), torch.bfloat16)
    expect("out", out, (1, n // 2 if gated else n), torch.float32 if kind == "head" else torch.bfloat16)
    check_epilogue(kind, 1, n, config.tiles(n), bias, residual, next_gain, scaled_out, ssq_out, best)
    squares, eps, inverse_width, parts = None, None, None, 1
    if norm is not None:
        squares, eps, inverse_width, parts = norm.squares, norm.eps, 1.0 / norm.width, norm.squares.shape[1]
    values, indices = best if best is not None else (None, None)
    launch(
        fp8_row_kernel, (config.tiles(n),), x, weight.words, weight.scales, out, residual, bias, next_gain, squares,
        scaled_out, ssq_out, values, indices, eps, inverse_width,
        N=n, K=k, P=parts, PP=next_power_of_two(parts), BN=config.block_n, BK=config.block_k, STAGES=config.stages,
        KIND=kind, pdl=pdl, num_warps=config.warps,
    )  # fmt: skip
