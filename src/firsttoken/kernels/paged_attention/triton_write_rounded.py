"""`triton_write` for a pool in eight or four bits: q rotated (and spread), K and V rounded into their tiles.

With KEEP the rows hold K and V afterwards as they will be read: what attention finds there, and what in the pages, is
the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.paged_attention.parts.triton_fields import encode, field_turns, load_fields, store_vector


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions"])
def write_rounded_kernel(
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
    W: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BH: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    F: tl.constexpr = D // W
    SPREAD: tl.constexpr = KV_FORMAT == "int4"
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BH
    offs_w = tl.arange(0, W)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + row, mask=row < rows, other=-1)
    there = position >= 0
    source = qkv + row.to(tl.int64) * qkv_stride
    if first < HEADS:
        cos, sin = field_turns(cos_sin, position, F, D, W, ROPE)
        target = q_out + row.to(tl.int64) * q_stride
        for h in tl.static_range(BH):
            q = load_fields(source + (first + h) * D, there, cos, sin, eps, q_weight, F, D, ROWS, W, ROPE, NORM, SPREAD)
            _store_fields(target + (first + h) * D, q, there, offs_w, F, W)
    else:
        slot = tl.load(slots + row, mask=there, other=0)
        block = tl.load(tables + slot.to(tl.int64) * table_stride + position // PAGE, mask=there, other=0)
        tile = kv + block.to(tl.int64) * block_stride + layer_offset
        at = tl.maximum(position, 0)
        if first < HEADS + KV_HEADS:
            cos, sin = field_turns(cos_sin, position, F, D, W, ROPE)
            for h in tl.static_range(BH):
                k = load_fields(
                    source + (first + h) * D, there, cos, sin, eps, k_weight, F, D, ROWS, W, ROPE, NORM, SPREAD
                )
                words, scale, zero, kept = encode(k, KV_FORMAT)
                own = tile + (first + h - HEADS) * TILE
                store_vector(own, at, words, scale, zero, there, 0, PAGE, W, KV_FORMAT)
                if KEEP:
                    _store_fields(source + (first + h) * D, kept, there, offs_w, F, W)
        else:
            for h in tl.static_range(BH):
                v = load_fields(
                    source + (first + h) * D, there, 0, 0, eps, k_weight, F, D, ROWS, W, False, False, False
                )
                words, scale, zero, kept = encode(v, KV_FORMAT)
                own = tile + (first + h - HEADS - KV_HEADS) * TILE
                store_vector(own, at, words, scale, zero, there, 1, PAGE, W, KV_FORMAT)
                if KEEP:
                    _store_fields(source + (first + h) * D, kept, there, offs_w, F, W)


@triton.jit
def _store_fields(target, x, there, offs_w, F: tl.constexpr, W: tl.constexpr):
    for i in tl.static_range(F):
        at = target[:, None] + i * W + offs_w[None, :]
        tl.store(at, x[i].to(target.dtype.element_ty), mask=there[:, None])
