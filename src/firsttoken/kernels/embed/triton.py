"""Embedding lookup on the GPU, with what the first layer's norm needs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.launch import launch, next_power_of_two


@triton.jit
def _embed(
    tokens, slots, positions, table, h, scaled, squares, gain, scale, L,
    H: tl.constexpr, BH: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BH)
    mask = columns < H if H != BH else None
    if gain is not None:
        gains = tl.load(gain + columns, mask=mask).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # All of it after the wait: the step before writes the token, and this step's inputs the position.
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    if position >= 0:
        token = tl.load(tokens + slot.to(tl.int64) * L + position)
        value = tl.load(table + token.to(tl.int64) * H + columns, mask=mask).to(tl.float32) * scale
        at = row.to(tl.int64) * H + columns
        tl.store(h + at, value.to(h.dtype.element_ty), mask=mask)
        if gain is not None:
            tl.store(scaled + at, (value * gains).to(scaled.dtype.element_ty), mask=mask)
            part = tl.arange(0, PP)
            squared = value * value if H == BH else tl.where(columns < H, value * value, 0.0)
            total = tl.where(part == 0, tl.sum(squared, 0), 0.0)
            tl.store(squares + row * P + part, total, mask=part < P)


def embed(
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    h: Tensor,
    *,
    gain: Tensor | None = None,
    scaled: Tensor | None = None,
    ssq: Tensor | None = None,
    scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """``h[t] = table[tokens[slots[t], positions[t]]] * scale`` for each row; a row at position -1 is left as it is.

    ``tokens`` int32 ``[slots, L]``, ``slots`` and ``positions`` int32 ``[T]``, ``table`` bf16 ``[V, H]``, ``h`` bf16
    ``[T, H]``. With ``gain`` ``[H]``, the weight of the norm that reads h next, also ``scaled`` bf16 ``[T, H]`` =
    h * gain and ``ssq`` float32 ``[T, P]``: the sum of squares of h in its first column and zeros in the others, for
    any P, so that the first layer reads as many parts as the others. All contiguous; allocates nothing. Token ids must
    be below V. Raises ValueError when the shapes do not fit.
    """
    rows, width = h.shape
    if tuple(slots.shape) != (rows,) or tuple(positions.shape) != (rows,):
        raise ValueError(
            f"slots {list(slots.shape)} and positions {list(positions.shape)} must be [{rows}] as h's rows"
        )
    if table.shape[1] != width:
        raise ValueError(f"the table's rows have {table.shape[1]} columns, those of h {width}")
    if len({value is None for value in (gain, scaled, ssq)}) != 1:
        raise ValueError("gain, scaled and ssq are given together or not at all")
    if scaled is not None and scaled.shape != h.shape:
        raise ValueError(f"scaled must be {list(h.shape)}, got {list(scaled.shape)}")
    if rows == 0:
        return
    parts = 1 if ssq is None else ssq.shape[1]
    block = next_power_of_two(width)
    launch(
        _embed, (rows,), tokens, slots, positions, table, h, scaled, ssq, gain, float(scale), tokens.shape[1],
        H=width, BH=block, P=parts, PP=next_power_of_two(parts), pdl=pdl, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
