"""Everything positional of many rows in one pass: QK norm, RoPE, and K and V into their pages.

Above the row counts where decode attention does this itself, it runs between the QKV projection and attention; it
reads each element once and writes it once.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.launch import cdiv, launch, next_power_of_two
from firsttoken.kernels.paged_attention.pages import PAGE, pages_of
from firsttoken.kernels.paged_attention.triton import load_heads, load_turns, rotate
from firsttoken.kernels.paged_attention.triton_write_rounded import write_rounded_kernel


def write_kv(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_out: Tensor,
    *,
    num_heads: int,
    cos_sin: Tensor | None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
    keep_k: bool = False,
    rounded: str | None = None,
    pdl: bool = False,
) -> Tensor:
    """Rotate q into ``q_out`` and put K and V in the cache, for rows of any requests in any order.

    ``qkv [T, (Hq + 2 Hkv) * D]`` is the raw projection (row stride free), q and k in pair order; ``q_out [T, Hq * D]``
    may be its own first columns. ``kv [blocks, layers, 2, Hkv, 16, D]`` contiguous; ``block_tables`` int32 ``[slots,
    W]``, ``slots`` and ``positions`` int32 ``[T]``, position -1 for a padding row, which writes nothing. ``cos_sin``
    float32 ``[max positions, D / 2, 2]`` or None; ``qk_norm`` as for `triton_decode.decode`. ``keep_k`` also writes the
    rotated k back into ``qkv``, for prefill attention that reads it there; of a pool that is ``rounded``, as for
    `triton_decode.decode`, k and v as they will be read.

    Raises ValueError for shapes that do not fit.
    """
    pages = pages_of(kv, rounded)
    rows, kv_heads, head_dim = positions.shape[0], pages.kv_heads, pages.head_dim
    columns = (num_heads + 2 * kv_heads) * head_dim
    if qkv.shape != (rows, columns) or qkv.stride(1) != 1:
        raise ValueError(f"qkv must be [{rows}, {columns}] with contiguous rows, got {tuple(qkv.shape)}")
    if q_out.shape != (rows, num_heads * head_dim) or q_out.stride(1) != 1:
        raise ValueError(
            f"q_out must be [{rows}, {num_heads * head_dim}] with contiguous rows, got {tuple(q_out.shape)}"
        )
    if not 0 <= layer < pages.layers:
        raise ValueError(f"kv must hold layer {layer}, got {tuple(kv.shape)}")
    q_weight, k_weight, eps = qk_norm if qk_norm is not None else (None, None, 0.0)
    # All heads of a program are of one kind (q, k or v), and their loads are in flight together.
    heads = math.gcd(8, num_heads, kv_heads)
    tile = max(8, 32 // heads)
    constants: dict[str, Any] = {"DP": next_power_of_two(head_dim), "KEEP_K": keep_k}
    if rounded is not None:
        # int4 multiplies heads by a matrix, for which sixteen rows are the least.
        tile = max(16, tile)
        constants = {"W": pages.words, "TILE": pages.tile, "KEEP": keep_k, "KV_FORMAT": rounded}
    launch(
        _write_kernel if rounded is None else write_rounded_kernel,
        (cdiv(rows, tile), (num_heads + 2 * kv_heads) // heads),
        qkv,
        kv,
        block_tables,
        slots,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        q_out,
        rows,
        qkv.stride(0),
        q_out.stride(0),
        block_tables.stride(0),
        kv.stride(0),
        layer * kv.stride(1),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        PAGE=PAGE,
        ROWS=tile,
        BH=heads,
        ROPE=cos_sin is not None,
        NORM=qk_norm is not None,
        **constants,
        pdl=pdl,
        num_warps=4,
    )
    return q_out


# Neither the number of rows nor where a view of row arrays begins changes the code: one variant serves them all.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _write_kernel(
    qkv,
    kv,
    tables,
    slots,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    q_out,
    rows,
    qkv_stride,
    q_stride,
    table_stride,
    block_stride,
    layer_offset,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BH: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BH
    offs_d = tl.arange(0, DP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + row, mask=row < rows, other=-1)
    there = position >= 0
    whole = there[:, None] & (offs_d < D)[None, :]
    source = (qkv + row.to(tl.int64) * qkv_stride)[:, None] + offs_d[None, :]
    if first < HEADS:
        target = (q_out + row.to(tl.int64) * q_stride)[:, None] + offs_d[None, :]
        if ROPE:
            cos, sin = load_turns(cos_sin, position, there, offs_d, D, DP)
        for h in tl.static_range(BH):
            q = load_heads(source + (first + h) * D, whole, eps, q_weight, offs_d, NORM, D)
            if ROPE:
                q = rotate(q, cos, sin, ROWS, DP)
            tl.store(target + (first + h) * D, q.to(q_out.dtype.element_ty), mask=whole)
    else:
        slot = tl.load(slots + row, mask=there, other=0)
        block = tl.load(tables + slot.to(tl.int64) * table_stride + position // PAGE, mask=there, other=0)
        place = layer_offset + position % PAGE * D
        target = (kv + block.to(tl.int64) * block_stride + place)[:, None] + offs_d[None, :]
        if first < HEADS + KV_HEADS:
            if ROPE:
                cos, sin = load_turns(cos_sin, position, there, offs_d, D, DP)
            for h in tl.static_range(BH):
                k = load_heads(source + (first + h) * D, whole, eps, k_weight, offs_d, NORM, D)
                if ROPE:
                    k = rotate(k, cos, sin, ROWS, DP)
                tl.store(target + (first + h - HEADS) * (PAGE * D), k.to(kv.dtype.element_ty), mask=whole)
                if KEEP_K:
                    tl.store(source + (first + h) * D, k.to(qkv.dtype.element_ty), mask=whole)
        else:
            # Heads of V follow those of K in a block, as they do in a row.
            for h in tl.static_range(BH):
                v = tl.load(source + (first + h) * D, mask=whole, other=0.0)
                tl.store(target + (first + h - HEADS) * (PAGE * D), v.to(kv.dtype.element_ty), mask=whole)
