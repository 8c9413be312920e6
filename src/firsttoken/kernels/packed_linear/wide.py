"""Products of FP8 rows with int4 weights in wide tiles: the launch of `triton_wide`."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.launch import interpreted, launch
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.config import ROOM_ROWS, WIDE_MOST_SPLIT, WideConfig
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.packed_linear.triton_wide import int4_wide_kernel


def wide_linear(
    values: Tensor,
    x_scales: Tensor,
    weight: PackedWeight,
    out: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    *,
    workspace: Workspace,
    config: WideConfig,
    kind: OpKind,
) -> None:
    """`rounded_linear` for int4 in groups of 64 or 128; ``values`` e4m3 ``[M, K]`` of `round_rows`, which has room for
    whole tiles behind them. Raises `ConfigError` for other groups and ValueError for too small a workspace."""
    m, (n, k) = len(values), weight.shape
    if weight.format != "int4" or weight.group not in (64, 128):
        raise ConfigError(
            f"wide tiles take int4 in groups of 64 or 128, got {weight.format} in groups of {weight.group}"
        )
    room = values.untyped_storage().nbytes() // values.shape[1] - values.storage_offset()
    if room < -(-m // ROOM_ROWS) * ROOM_ROWS:
        raise ValueError(f"{m} rows have room for {room}, wide tiles need a multiple of {ROOM_ROWS}")
    division = config.divide(n, m, k)
    floats, slots = config.workspace(division)
    shares = slots > 0
    # Two parts are added to each other, more in their order from memory.
    most = 1 if not shares else 2 if division.split == 2 else WIDE_MOST_SPLIT
    if shares and (workspace.partial.numel() < floats or workspace.arrived.numel() < slots):
        raise ValueError(f"{config} over {m} rows and {n} columns needs a workspace of {floats}, {slots}")
    launch(
        int4_wide_kernel, (division.programs,), values, x_scales, weight.words.view(torch.uint8), weight.scales,
        weight.zeros, weight.row_scales, out, residual, bias, workspace.partial if shares else None,
        workspace.arrived if shares else None, m, division.whole, division.split,
        N=n, K=k, GROUP=weight.group, CHUNKS=weight.chunks, BN=config.block_n, BM=config.block_m,
        MOST=most, STAGES=config.stages, KIND=kind, PLAIN=interpreted(), pdl=False,
        num_warps=config.warps,
    )  # fmt: skip
