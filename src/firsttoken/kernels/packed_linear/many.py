"""Products of many rows with packed weights: both sides in FP8, by the vendor's library; imports Triton.

Rows of x are scaled to what e4m3 holds, each by itself. FP8 weights are read as they are; int4 ones are written to
scratch as FP8 first, which rounds them by 2 to 3 % on top of the 10 % that four bits have cost, and takes time that
only many hundreds of rows make up for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.kernels.launch import interpreted, launch, next_power_of_two
from firsttoken.kernels.packed_linear.layout import FP8_MAX, PackedWeight
from firsttoken.kernels.packed_linear.triton_many import int4_to_fp8_kernel, quantize_rows_kernel

_MAX_WIDTH = 1 << 16


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` bf16 ``[M, K]`` -> e4m3 ``[M, K]`` and the scale of each row, float32 ``[M, 1]``."""
    rows, k = x.shape
    if k > _MAX_WIDTH or not x.is_contiguous():
        raise ValueError(f"rows must be contiguous and at most {_MAX_WIDTH} long, got {list(x.shape)} {x.stride()}")
    out = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = next_power_of_two(k)
        launch(
            quantize_rows_kernel, (rows,), x, out, scales,
            K=k, BK=block, MOST=FP8_MAX, PLAIN=interpreted(), pdl=False, num_warps=min(max(block // 1024, 1), 16),
        )  # fmt: skip
    return out, scales


def as_fp8(weight: PackedWeight, scratch: Tensor | None) -> tuple[Tensor, Tensor]:
    """e4m3 ``[N, K]`` and a scale a row, float32 ``[N]``: int4 weights are written to ``scratch`` (bytes), where they
    stay until the next call."""
    if weight.format == "fp8":
        return weight.words, weight.scales
    n, k = weight.shape
    if scratch is None or scratch.numel() < n * k:
        raise ValueError(f"int4 weights of {n} x {k} need a scratch of {n * k} bytes")
    out = scratch[: n * k].view(torch.float8_e4m3fn).view(n, k)
    assert weight.row_scales is not None
    launch(
        int4_to_fp8_kernel, (weight.tiles, weight.chunks), weight.words, weight.scales, weight.zeros, weight.row_scales,
        out.view(torch.int32), N=n, K=k, GROUP=weight.group, CHUNKS=weight.chunks, PLAIN=interpreted(),
        pdl=False, num_warps=4,
    )  # fmt: skip
    return out, weight.row_scales


def many_rows(x: Tensor, weight: PackedWeight, scratch: Tensor | None) -> Tensor:
    """``x`` bf16 ``[M, K]`` times the weights: bf16 ``[M, N]``, products in FP8 with float32 sums."""
    rows, x_scales = quantize_rows(x)
    matrix, scales = as_fp8(weight, scratch)
    if x.is_meta:
        return x.new_empty((x.shape[0], weight.n))
    if not x.is_cuda:  # no library has such a product elsewhere
        return (rows.float() @ matrix.float().t() * x_scales * scales).bfloat16()
    return torch._scaled_mm(rows, matrix.t(), x_scales, scales[None, :], out_dtype=torch.bfloat16)
