"""SwiGLU's gate over interleaved columns, at the speed of a copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.launch import cdiv, launch


@triton.jit
def _silu_mul(gate_up, out, total, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Pairs lie side by side, so rows do not matter: element i of the result comes from elements 2i and 2i + 1."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0).to(tl.int64) * BLOCK
    pair = tl.arange(0, 2 * BLOCK)
    pairs = tl.load(gate_up + 2 * first + pair, mask=pair < 2 * (total - first), other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    value = gate / (1.0 + tl.exp(-gate)) * up
    at = tl.arange(0, BLOCK)
    tl.store(out + first + at, value.to(out.dtype.element_ty), mask=at < total - first)


def silu_mul(gate_up: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """``gate_up`` bf16 ``[T, 2 n]``, columns alternating gate and up -> ``out`` bf16 ``[T, n]`` = silu(gate) * up.

    Both contiguous. Allocates nothing. Raises ValueError when the shapes do not fit.
    """
    rows, width = gate_up.shape
    if width % 2 or tuple(out.shape) != (rows, width // 2):
        raise ValueError(f"gate_up {list(gate_up.shape)} needs an out of half as many columns, got {list(out.shape)}")
    if not (gate_up.is_contiguous() and out.is_contiguous()):
        raise ValueError("gate_up and out must be contiguous")
    total = out.numel()
    if total == 0:
        return
    block = 2048
    launch(_silu_mul, (cdiv(total, block),), gate_up, out, total, BLOCK=block, pdl=pdl, num_warps=8)
