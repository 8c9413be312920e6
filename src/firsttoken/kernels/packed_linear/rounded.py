"""Products of rows that are FP8, with packed weights; imports Triton.

Rows of x are scaled to what e4m3 holds, each by itself, which rounds them by 2 to 3 %; int4 and FP8 weights are
multiplied as they are. From some hundred rows on int4 is scaled and rounded to FP8, too, by as much again: in the
product (`triton_wide`) or, for the most, into scratch before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.kernels.launch import cdiv, interpreted, launch, next_power_of_two
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.linear.small import Workspace, expect
from firsttoken.kernels.packed_linear.config import ROOM_ROWS, RoundedConfig, WideConfig, rounded_config
from firsttoken.kernels.packed_linear.layout import FP8_MAX, PackedWeight
from firsttoken.kernels.packed_linear.triton_rounded import fp8_rounded_kernel, int4_rounded_kernel
from firsttoken.kernels.packed_linear.triton_rows import int4_to_fp8_kernel, round_rows_kernel
from firsttoken.kernels.packed_linear.wide import wide_linear

_MAX_WIDTH = 1 << 16
_CHUNKS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, eq=False)
class RoundedRows:
    """``values`` e4m3 ``[M, K]`` with a scale each, float32 ``[M]``. For int4 weights (``as_bytes``) the columns are in
    the order of their bytes, padded to 64, and behind the rows is room up to a multiple of ROOM_ROWS. ``sums`` float32
    ``[K / group, M]`` are those of each group's values, where they were wanted."""

    values: Tensor
    scales: Tensor
    sums: Tensor | None
    k: int
    as_bytes: bool

    @property
    def rows(self) -> int:
        return self.values.shape[0]


def config_for(weight: PackedWeight, rows: int) -> RoundedConfig | WideConfig:
    """How ``rows`` rows are multiplied with ``weight``."""
    zeros = weight.zeros is not None
    return rounded_config(weight.n, weight.k, rows, weight.format, weight.group, zeros=zeros)


def round_rows(
    x: Tensor,
    weight: PackedWeight,
    *,
    config: RoundedConfig | WideConfig | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> RoundedRows:
    """``x`` bf16 ``[M, K]`` for a product with ``weight`` by ``config`` (any, where none is given); with ``gain``
    ``[K]`` its RMSNorm. Raises ValueError for rows that do not fit."""
    rows, k = x.shape
    if k != weight.k or k > _MAX_WIDTH or not x.is_contiguous():
        raise ValueError(
            f"rows must be contiguous, as long as those of the weights ({weight.k}) and at most {_MAX_WIDTH}, "
            f"got {list(x.shape)} {x.stride()}"
        )
    expect("gain", gain, (k,))
    group = weight.group
    room = cdiv(rows, ROOM_ROWS) * ROOM_ROWS if group else rows
    values = torch.empty((room, _padded(k, group)), dtype=torch.float8_e4m3fn, device=x.device)[:rows]
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    with_sums = group > 0 and (config is None or config.sums)
    sums = torch.empty((k // group, rows), dtype=torch.float32, device=x.device) if with_sums else None
    if rows:
        block = next_power_of_two(max(k, 64))
        launch(
            round_rows_kernel, (rows,), x, gain, values, scales, sums, eps, 1.0 / k, rows,
            K=k, BK=block, GROUP=group, MOST=FP8_MAX, PLAIN=interpreted(), pdl=False,
            num_warps=min(max(block // 1024, 1), 16),
        )  # fmt: skip
    return RoundedRows(values, scales, sums, k, group > 0)


def as_fp8(weight: PackedWeight, scratch: Tensor | None) -> PackedWeight:
    """``weight`` as FP8: int4 is written to ``scratch`` (bytes), where it stays until the next call, with its columns
    in the order of its bytes. Raises ValueError for scratch that is too small."""
    if weight.format == "fp8":
        return weight
    n, k = weight.n, _padded(weight.k, weight.group)
    if scratch is None or scratch.numel() < n * k:
        raise ValueError(f"int4 weights of {n} x {k} need a scratch of {n * k} bytes")
    out = scratch[: n * k].view(torch.float8_e4m3fn).view(n, k)
    assert weight.row_scales is not None
    launch(
        int4_to_fp8_kernel, (weight.tiles, cdiv(weight.chunks, _CHUNKS_AT_ONCE)),
        weight.words.view(torch.uint8), weight.scales, weight.zeros, weight.row_scales, out,
        N=n, K=weight.k, GROUP=weight.group, CHUNKS=weight.chunks, EACH=_CHUNKS_AT_ONCE, PLAIN=interpreted(),
        pdl=False, num_warps=4,
    )  # fmt: skip
    return PackedWeight("fp8", n, k, 0, out, weight.row_scales)


def rounded_linear(
    x: RoundedRows,
    weight: PackedWeight,
    out: Tensor,
    *,
    workspace: Workspace,
    scratch: Tensor | None = None,
    config: RoundedConfig | WideConfig | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> None:
    """Write ``x W^T`` into ``out`` bf16 ``[M, N]``: plus ``bias`` ``[N]``, and ``residual`` bf16 ``[M, N]`` (which may
    be ``out``), or ``gated`` as in `small_linear`. Raises `ConfigError` for a config and ValueError for tensors that do
    not fit."""
    m, n = x.rows, weight.n
    kind: OpKind = "gated" if gated else "plain" if residual is None else "residual"
    if x.k != weight.k or x.as_bytes != (weight.format == "int4"):
        raise ValueError(f"rows rounded for another product: {x.k} columns, weights {weight.format} {weight.shape}")
    if gated and residual is not None:
        raise ValueError("a gated product takes no residual")
    expect("out", out, (m, n // 2 if gated else n), torch.bfloat16)
    expect("residual", residual, (m, n), torch.bfloat16)
    expect("bias", bias, (n,))
    if config is None:
        config = config_for(weight, m)
    if isinstance(config, WideConfig):
        if m:
            wide_linear(
                x.values, x.scales, weight, out, residual, bias, workspace=workspace, config=config, kind=kind
            )  # fmt: skip
        return
    if config.format == "fp8":
        weight = as_fp8(weight, scratch)
    elif x.sums is None and config.sums:
        raise ValueError(f"{config} takes the sums of the rows' groups: name it to round_rows")
    config.check(weight.k)
    blocks = cdiv(m, config.block_m)
    partial = arrived = None
    if config.split > 1:
        partial, arrived = workspace.partial, workspace.arrived
        floats, slots = config.workspace_floats(n, m), config.tiles(n) * blocks
        if partial.numel() < floats or arrived.numel() < slots:
            raise ValueError(f"{config} over {m} rows and {n} columns needs a workspace of {floats}, {slots}")
    if m == 0:
        return
    steps = weight.k // weight.group if weight.group else cdiv(weight.k, config.block_k)
    span = cdiv(steps, config.split)
    tile = {"BN": config.block_n, "BM": config.block_m, "SPLIT": config.split, "SPAN": span, "STAGES": config.stages}
    options = {**tile, "KIND": kind, "PLAIN": interpreted(), "num_warps": config.warps}
    grid = (config.tiles(n) * config.split * blocks,)
    after = (out, residual, bias, partial, arrived, m)
    if weight.format == "fp8":
        launch(
            fp8_rounded_kernel, grid, x.values, x.scales, weight.words, weight.scales, *after,
            N=n, K=weight.k, BK=config.block_k, pdl=False, **options,
        )  # fmt: skip
    else:
        launch(
            int4_rounded_kernel, grid, x.values, x.scales, x.sums, weight.words.view(torch.uint8), weight.scales,
            weight.zeros, *after, N=n, K=weight.k, GROUP=weight.group, CHUNKS=weight.chunks,
            PADDED=max(next_power_of_two(span), 16), pdl=False, **options,
        )  # fmt: skip


def _padded(k: int, group: int) -> int:
    return cdiv(k, 64) * 64 if group else k
