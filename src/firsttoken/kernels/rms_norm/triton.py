"""Residual add and RMSNorm of many rows at the speed of a copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.launch import cdiv, launch, next_power_of_two
from firsttoken.kernels.linear.triton import inverse_rms

_MAX_WIDTH = 1 << 15


@triton.jit(do_not_specialize=["T"])
def _add_rms_norm(
    h, y, gain, out, eps, inverse_width, T, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """One program norms ROWS rows, one after the other, and reads the gain once for them."""
    columns = tl.arange(0, BH)
    mask = columns < H if H != BH else None
    gains = tl.load(gain + columns, mask=mask).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0) * ROWS
    place = first.to(tl.int64) * H + columns
    for i in range(tl.minimum(ROWS, T - first)):
        at = place + i * H
        value = tl.load(h + at, mask=mask).to(tl.float32)
        if y is not None:
            value += tl.load(y + at, mask=mask).to(tl.float32)
            tl.store(h + at, value.to(h.dtype.element_ty), mask=mask)
        squares = value * value if H == BH else tl.where(columns < H, value * value, 0.0)
        scale = inverse_rms(tl.sum(squares, 0) * inverse_width + eps)
        tl.store(out + at, (value * scale * gains).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(h: Tensor, y: Tensor | None, gain: Tensor, eps: float, out: Tensor, *, pdl: bool = False) -> None:
    """``h += y`` in place, then ``out = h / rms(h) * gain``; without ``y`` only the norm, and h is not written.

    ``h``, ``y``, ``out`` bf16 ``[T, H]``, ``gain`` ``[H]``, all contiguous; sums are float32, and the norm is that of
    the sum before it is rounded to bf16. ``out`` may be ``y``, or ``h`` where there is no ``y``. Allocates nothing.
    Raises ValueError when the shapes differ or ``H`` is beyond 32,768.
    """
    rows, width = h.shape
    for name, tensor in (("h", h), ("y", y), ("out", out)):
        if tensor is not None and (tensor.shape != h.shape or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be contiguous {list(h.shape)}, got {list(tensor.shape)} {tensor.stride()}")
    if tuple(gain.shape) != (width,):
        raise ValueError(f"gain must be [{width}], got {list(gain.shape)}")
    if width > _MAX_WIDTH:
        raise ValueError(f"rows of {width} do not fit one program; at most {_MAX_WIDTH}")
    if rows == 0:
        return
    block = next_power_of_two(width)
    # Four rows share one reading of the gain once there are programs enough for every multiprocessor.
    each = 4 if rows >= 2048 else 2 if rows >= 1024 else 1
    warps = min(max(block // 512, 1), 16)
    grid = (cdiv(rows, each),)
    launch(
        _add_rms_norm, grid, h, y, gain, out, eps, 1.0 / width, rows,
        H=width, BH=block, ROWS=each, pdl=pdl, num_warps=warps,
    )  # fmt: skip
