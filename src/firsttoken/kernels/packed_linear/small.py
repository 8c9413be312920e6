"""`packed_linear`: what `linear.small.small_linear` does, over packed weights; imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.launch import interpreted, launch
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.linear.small import Norm, check_epilogue, expect
from firsttoken.kernels.packed_linear.config import PackedConfig
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.packed_linear.triton import packed_linear_kernel


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    *,
    config: PackedConfig,
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
    """Write ``x W^T`` with its epilogue into ``out``. Everything but ``weight`` and ``config`` is as for
    `small_linear`, for 1 to 64 rows; K must be a multiple of 16.

    Raises `ConfigError` for a config that does not fit and `ValueError` for tensors that do not fit each other.
    """
    kind: OpKind = "gated" if gated else "head" if best is not None else "plain" if residual is None else "residual"
    (m, k), n = x.shape, weight.n
    if not 1 <= m <= config.block_m:
        raise ConfigError(f"a config with block_m = {config.block_m} takes 1 to {config.block_m} rows, got {m}")
    config.check(weight.chunks)
    if k != weight.k or k % 16:
        raise ValueError(f"x has {k} columns, the weights {weight.k}: they must be equal and a multiple of 16")
    expect("x", x, (m, k), torch.bfloat16)
    expect("out", out, (m, n // 2 if gated else n), torch.float32 if kind == "head" else torch.bfloat16)
    check_epilogue(kind, m, n, config.tiles(n), bias, residual, next_gain, scaled_out, ssq_out, best)
    squares, eps, inverse_width, parts = None, None, None, 1
    if norm is not None:
        squares, eps, inverse_width = norm.squares, norm.eps, 1.0 / norm.width
        parts = squares.shape[1]
        expect("norm.squares", squares, (m, parts), torch.float32)
    values, indices = best if best is not None else (None, None)
    launch(
        packed_linear_kernel,
        (config.tiles(n),),
        x.view(torch.int32),
        weight.words.view(torch.int32),
        weight.scales.view(torch.int32).view(-1) if weight.format == "int4" else weight.scales,
        None if weight.zeros is None else weight.zeros.view(torch.int32).view(-1),
        *(out, residual, bias, next_gain, squares, scaled_out, ssq_out, values, indices),
        *(eps, inverse_width, m),
        pdl=pdl,
        N=n,
        K=k,
        P=parts,
        PP=1 << (parts - 1).bit_length(),
        FORMAT=weight.format,
        GROUP=weight.group,
        RW=config.row_warps,
        KW=config.column_warps,
        TW=config.warp_tiles,
        BM=config.block_m,
        AHEAD=config.ahead,
        KIND=kind,
        PLAIN=interpreted(),
        num_warps=config.warps,
    )
