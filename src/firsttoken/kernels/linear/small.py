"""``y = x W^T`` for 1 to 64 rows with what stands before and after it fused in; imports Triton.

RMSNorm is split between neighbours ("the producer prepares"): who writes the residual stream h also writes
``bf16(h * gain)`` of the norm that reads it next, and each program's sum of squares of its columns. The reader
multiplies its product by ``rsqrt(sum / width + eps)`` at the end, so no kernel walks over h to norm it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.launch import interpreted, launch
from firsttoken.kernels.linear.config import MAX_ROWS, LinearConfig, OpKind
from firsttoken.kernels.linear.triton import dot_linear, fma_linear


class Norm(NamedTuple):
    """The norm whose gain is already in x: ``squares`` float32 ``[M, P]`` sum to that of h over ``width`` columns."""

    squares: Tensor
    eps: float
    width: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where split-K programs meet. Kernels that follow each other on a stream share one; two streams need two."""

    partial: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, floats: int, tiles: int, device: torch.device) -> Workspace:
        """Room for ``floats`` float32 values and ``tiles`` counters, which start at 0 and return to it."""
        return cls(
            torch.empty(max(floats, 1), dtype=torch.float32, device=device),
            torch.zeros(max(tiles, 1), dtype=torch.int32, device=device),
        )


def small_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    config: LinearConfig,
    workspace: Workspace | None = None,
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
    """Write ``x W^T`` with its epilogue into ``out``; allocates nothing, so it can be captured.

    ``x`` bf16 ``[M, K]`` with 1 to 64 rows, ``weight`` bf16 ``[N, K]``, ``bias`` ``[N]``, all contiguous; sums are
    float32. ``out`` is bf16 ``[M, N]``, except:

    * ``gated``: W's rows alternate gate and up, ``out`` is bf16 ``[M, N / 2]`` = silu(gate) * up.
    * ``residual`` bf16 ``[M, N]`` is added (``out`` may be the same tensor). With ``next_gain`` ``[N]`` also
      ``scaled_out`` bf16 ``[M, N]`` = out * next_gain and ``ssq_out`` float32 ``[M, config.tiles(N)]``, both from the
      sum before it is rounded.
    * ``best = (values, indices)``, float32 and int32 ``[M, config.tiles(N)]``: each tile's largest logit and its
      index (NaN above all, lowest index at ties); ``out`` is then float32 ``[M, N]``.

    ``workspace`` is needed when ``config.split_k > 1``. Rows do not depend on each other. Raises `ConfigError` for a
    config that does not fit and `ValueError` for tensors that do not fit each other.
    """
    kind: OpKind = "gated" if gated else "head" if best is not None else "plain" if residual is None else "residual"
    (m, k), n = x.shape, weight.shape[0]
    _check_rows(config, m)
    config.check(kind, n, k)
    expect("weight", weight, (n, k), torch.bfloat16)
    expect("x", x, (m, k), torch.bfloat16)
    expect("out", out, (m, n // 2 if gated else n), torch.float32 if kind == "head" else torch.bfloat16)
    check_epilogue(kind, m, n, config.tiles(n), bias, residual, next_gain, scaled_out, ssq_out, best)
    squares, eps, inverse_width, parts = None, None, None, 1
    if norm is not None:
        squares, eps, inverse_width = norm.squares, norm.eps, 1.0 / norm.width
        parts = squares.shape[1]
        expect("norm.squares", squares, (m, parts), torch.float32)
    values, indices = best if best is not None else (None, None)
    tensors = (x, weight, out, residual, bias, next_gain, squares, scaled_out, ssq_out, values, indices)
    sizes = {"N": n, "K": k, "P": parts, "PP": 1 << (parts - 1).bit_length()}
    tile = {"BN": config.block_n, "BK": config.block_k, "STAGES": config.stages, "KIND": kind}
    options: dict[str, Any] = {**sizes, **tile, "num_warps": config.warps}
    tiles = config.tiles(n)
    if config.kernel == "fma":
        launch(fma_linear, (tiles,), *tensors, eps, inverse_width, pdl=pdl, **options)
        return
    partial, arrived = _parts(config, workspace, n)
    launch(
        dot_linear,
        (tiles, config.split_k),
        *(*tensors, partial, arrived, eps, inverse_width, m),
        pdl=pdl,
        **options,
        BM=config.block_m,
        SPLIT=config.split_k,
        PREFETCH=config.prefetch,
        UPCAST=interpreted(),
    )


def _check_rows(config: LinearConfig, rows: int) -> None:
    if not 1 <= rows <= min(config.block_m, MAX_ROWS):
        raise ConfigError(f"a config with block_m = {config.block_m} takes 1 to {config.block_m} rows, got {rows}")


def _parts(config: LinearConfig, workspace: Workspace | None, n: int) -> tuple[Tensor | None, Tensor | None]:
    if config.split_k == 1:
        return None, None
    floats, tiles = config.workspace_floats(n), config.tiles(n)
    if workspace is None or workspace.partial.numel() < floats or workspace.arrived.numel() < tiles:
        raise ValueError(f"split_k = {config.split_k} over {n} columns needs a workspace of {floats}, {tiles}")
    return workspace.partial, workspace.arrived


def check_epilogue(
    kind: OpKind,
    m: int,
    n: int,
    tiles: int,
    bias: Tensor | None,
    residual: Tensor | None,
    next_gain: Tensor | None,
    scaled_out: Tensor | None,
    ssq_out: Tensor | None,
    best: tuple[Tensor, Tensor] | None,
) -> None:
    expect("bias", bias, (n,))
    expect("residual", residual, (m, n), torch.bfloat16)
    expect("next_gain", next_gain, (n,))
    expect("scaled_out", scaled_out, (m, n), torch.bfloat16)
    expect("ssq_out", ssq_out, (m, tiles), torch.float32)
    if best is not None:
        expect("best values", best[0], (m, tiles), torch.float32)
        expect("best indices", best[1], (m, tiles), torch.int32)
    if kind in ("gated", "head") and residual is not None:
        raise ValueError(f"a {kind} product takes no residual")
    if kind == "gated" and best is not None:
        raise ValueError("a gated product has no best index")
    if len({value is None for value in (next_gain, scaled_out, ssq_out)}) != 1:
        raise ValueError("next_gain, scaled_out and ssq_out are given together or not at all")
    if next_gain is not None and kind != "residual":
        raise ValueError("next_gain belongs to a product with a residual")


def expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {list(shape)}, got {list(tensor.shape)} {tensor.stride()}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
