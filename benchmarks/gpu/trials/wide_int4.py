"""The host's side of `triton_wide_int4`: which tiles, how they are divided among programs, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.trials.triton_wide_int4 import wide_int4_kernel
from firsttoken.core.errors import ConfigError
from firsttoken.kernels.launch import cdiv, interpreted, launch
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.linear.small import Workspace, expect
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.packed_linear.rounded import RoundedRows

MULTIPROCESSORS = 132
_SPLITS = (1, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class WideConfig:
    """Tiles of ``tall`` pieces of ``piece_columns`` rows of W by ``wide`` pieces of ``piece_rows`` rows of x."""

    tall: int = 1
    piece_rows: int = 64
    wide: int = 4
    stages: int = 4
    piece_columns: int = 128

    @property
    def rows(self) -> int:
        return self.piece_rows * self.wide

    def tiles(self, n: int, m: int) -> int:
        return cdiv(n, self.tall * self.piece_columns) * cdiv(m, self.rows)


@dataclass(frozen=True, slots=True)
class Division:
    """The first ``whole`` tiles have a program each, the others ``split``, which divide their groups of columns."""

    tiles: int
    whole: int
    split: int

    @property
    def shared(self) -> int:
        return self.tiles - self.whole if self.split > 1 else 0

    @property
    def programs(self) -> int:
        return self.whole + (self.tiles - self.whole) * self.split

    def workspace(self, config: WideConfig) -> tuple[int, int]:
        """float32 values and counters that programs leave for each other."""
        pieces = self.shared * config.tall * config.wide
        return pieces * self.split * config.piece_columns * config.piece_rows, pieces


def divide(tiles: int, groups: int, multiprocessors: int = MULTIPROCESSORS) -> Division:
    """What is left after full waves is split so that it takes least; parts have 8 groups or more. To leave its sums to
    another costs a part about as much as 2.5 groups."""
    whole = tiles // multiprocessors * multiprocessors
    rest = tiles - whole

    def waves(split: int) -> float:
        return cdiv(rest * split, multiprocessors) / split + (2.5 * split / groups if split > 1 else 0)

    def fits(split: int) -> bool:
        return split == 1 or (groups >= 8 * split and (split - 1) * cdiv(groups, split) < groups)

    return Division(tiles, whole, min(filter(fits, _SPLITS), key=waves) if rest else 1)


def with_room(rows: RoundedRows, config: WideConfig) -> RoundedRows:
    """The same rows in memory that whole tiles may be read from."""
    m, k = rows.values.shape
    values = torch.empty((cdiv(m, config.rows) * config.rows, k), dtype=rows.values.dtype, device=rows.values.device)
    values[:m].view(torch.uint8).copy_(rows.values.view(torch.uint8))
    return RoundedRows(values[:m], rows.scales, rows.sums, rows.k)


def wide_int4_linear(
    x: RoundedRows,
    weight: PackedWeight,
    out: Tensor,
    *,
    workspace: Workspace,
    config: WideConfig,
    division: Division | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> None:
    """As `rounded_linear`, for int4 in groups of 64 or 128 and rows `with_room`. Raises `ConfigError` for other
    groups and ValueError for tensors that do not fit."""
    m, (n, k) = x.rows, weight.shape
    kind: OpKind = "gated" if gated else "plain" if residual is None else "residual"
    if weight.format != "int4" or weight.group not in (64, 128):
        raise ConfigError(f"wide tiles take int4 in groups of 64 or 128, got {weight.format} in {weight.group}")
    if x.k != k or x.sums is None:
        raise ValueError(f"rows rounded for another product: {x.k} columns, weights {weight.shape}")
    room = x.values.untyped_storage().nbytes() - x.values.storage_offset()
    if room < cdiv(m, config.rows) * config.rows * x.values.shape[1]:
        raise ValueError(f"{m} rows have no room for tiles of {config.rows}")
    expect("out", out, (m, n // 2 if gated else n), torch.bfloat16)
    expect("residual", residual, (m, n), torch.bfloat16)
    expect("bias", bias, (n,))
    if division is None:
        division = divide(config.tiles(n, m), k // weight.group)
    floats, slots = division.workspace(config)
    partial, arrived = (workspace.partial, workspace.arrived) if slots else (None, None)
    if slots and (workspace.partial.numel() < floats or workspace.arrived.numel() < slots):
        raise ValueError(f"{division} of {config} needs a workspace of {floats}, {slots}")
    launch(
        wide_int4_kernel, (division.programs,), x.values, x.scales, x.sums, weight.words.view(torch.uint8),
        weight.scales, weight.zeros, out, residual, bias, partial, arrived, m, division.whole,
        N=n, K=k, GROUP=weight.group, CHUNKS=weight.chunks, TALL=config.tall, WIDE=config.wide,
        PN=config.piece_columns, PM=config.piece_rows, SPLIT=division.split, STAGES=config.stages, KIND=kind,
        PLAIN=interpreted(), pdl=False, num_warps=8,
    )  # fmt: skip
