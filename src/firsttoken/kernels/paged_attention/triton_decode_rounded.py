"""Decode attention over K and V in eight and four bits: `triton_split` and `triton_balanced` with heads in fields.

How rows are cut, what is fetched before the wait and who combines is as there; what differs is how keys are read
(`parts.triton_row_rounded`).
"""

# ruff: noqa: RUF005 - Triton joins tuples with a plus alone.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.paged_attention.parts.triton_combine import combine_last
from firsttoken.kernels.paged_attention.parts.triton_fields import field_turns
from firsttoken.kernels.paged_attention.parts.triton_row_rounded import (
    add_rounded_token,
    attend_part,
    leave_fields,
    load_queries,
    load_words,
    store_fields,
)
from firsttoken.kernels.paged_attention.triton import page_of
from firsttoken.kernels.paged_attention.triton_balanced import find_part
from firsttoken.kernels.paged_attention.triton_split import cut_row


# Views into a step's row arrays begin anywhere: one variant serves them all.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def rounded_split_kernel(
    qkv,
    kv,
    tables,
    slots,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    slopes,
    out,
    parts,
    weights,
    arrived,
    qkv_stride,
    out_stride,
    table_stride,
    block_stride,
    layer_offset,
    eps,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    COMBINED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    QUERY: tl.constexpr,
    COMPUTE: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        if not EARLY_ROWS:
            gdc_wait()
    F: tl.constexpr = D // W
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    first, base, share, active = cut_row(position, SPLITS, MIN_SPLIT, PAGE, BT, WINDOW)
    if (position < 0) | (split > active) | ((active == 1) & (split == 1)):
        # Waiting keeps the chain of dependent launches whole, also for a program that needs nothing.
        if PDL and EARLY_ROWS:
            gdc_wait()
        return

    table = tables + slot.to(tl.int64) * table_stride
    tile = kv + layer_offset + head * TILE
    source = qkv + row.to(tl.int64) * qkv_stride
    cell = (row * KV_HEADS + head) * (SPLITS + 1)
    counter = arrived + row * KV_HEADS + head
    offs_g = tl.arange(0, GROUP_TILE)
    turned = field_turns(cos_sin, position + tl.zeros([GROUP_TILE], tl.int32), F, D, W, ROPE)
    target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)

    if SPLITS > 1 and split == active:
        # The program of the new token.
        block = tl.load(table + position // PAGE)
        if PDL and EARLY_ROWS:
            gdc_wait()
        q, _ = load_queries(
            source, head, turned, eps, q_weight, GROUP, GROUP_TILE, F, D, W, ROPE, NORM, KV_FORMAT == "int4", QUERY
        )
        own, values = add_rounded_token(
            q, source, tile + block.to(tl.int64) * block_stride, head, position, cos_sin, eps, k_weight, scale, softcap,
            KV_HEADS, GROUP, F, D, W, PAGE, ROPE, NORM, SOFTCAP, KV_FORMAT,
        )  # fmt: skip
        whole = ()
        for i in tl.static_range(F):
            whole = whole + (tl.zeros([GROUP_TILE, W], tl.float32) + values[i],)
        leave_fields(parts, weights, cell + active, own, whole, GROUP, GROUP_TILE, F, D, W)
        combine_last(parts, weights, target, counter, cell, active + 1, GROUP, GROUP_PARTS, D, DP, COMBINED)
        return

    begin = base + split * share
    end = tl.minimum(begin + share, position)
    at = begin + tl.arange(0, BT)
    seen = (at < end) & (at >= first)
    blocks = tl.load(table + page_of(at, PAGE), mask=seen, other=0)
    loaded = load_words(tile, blocks, at, seen, block_stride, PAGE, W, KV_FORMAT)
    at += BT
    blocks = tl.load(table + page_of(at, PAGE), mask=at < end, other=0)
    slope = tl.zeros([GROUP_TILE], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + offs_g, mask=offs_g < GROUP, other=0.0)
    if PDL and EARLY_ROWS:
        gdc_wait()

    fields, weight = attend_part(
        source, tile, table, loaded, seen, blocks, begin, end, active == 1, head, position, turned, cos_sin, eps,
        q_weight, k_weight, slope, scale, softcap, block_stride,
        KV_HEADS, GROUP, GROUP_TILE, F, D, W, PAGE, BT, ROPE, NORM, ALIBI, SOFTCAP, KV_FORMAT, QUERY, COMPUTE, PLAIN,
        STAGES,
    )  # fmt: skip
    if active == 1:
        store_fields(target, fields, GROUP, GROUP_TILE, F, D, W)
    elif SPLITS > 1:
        leave_fields(parts, weights, cell + split, weight, fields, GROUP, GROUP_TILE, F, D, W)
        combine_last(parts, weights, target, counter, cell, active + 1, GROUP, GROUP_PARTS, D, DP, COMBINED)


# Rows and programs come in many numbers, too.
@triton.jit(do_not_specialize=["rows", "programs"], do_not_specialize_on_alignment=["slots", "positions"])
def rounded_balanced_kernel(
    qkv,
    kv,
    tables,
    slots,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    slopes,
    out,
    parts,
    weights,
    arrived,
    qkv_stride,
    out_stride,
    table_stride,
    block_stride,
    layer_offset,
    eps,
    scale,
    softcap,
    rows,
    programs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    COMBINED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    QUERY: tl.constexpr,
    COMPUTE: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        if not EARLY_ROWS:
            gdc_wait()
    F: tl.constexpr = D // W
    row, position, share, part, count = find_part(positions, item, rows, programs, ROWS, MIN_SHARE, PAGE, BT, WINDOW)
    if row >= rows:
        # Waiting keeps the chain of dependent launches whole, also for a program that needs nothing.
        if PDL and EARLY_ROWS:
            gdc_wait()
        return

    slot = tl.load(slots + row)
    table = tables + slot.to(tl.int64) * table_stride
    tile = kv + layer_offset + head * TILE
    source = qkv + row.to(tl.int64) * qkv_stride
    offs_g = tl.arange(0, GROUP_TILE)
    # Keys before the new token: [first, position), read from the page boundary below.
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    begin = first // PAGE * PAGE + part * share
    end = tl.minimum(begin + share, position)
    at = begin + tl.arange(0, BT)
    seen = (at < end) & (at >= first)
    blocks = tl.load(table + page_of(at, PAGE), mask=seen, other=0)
    loaded = load_words(tile, blocks, at, seen, block_stride, PAGE, W, KV_FORMAT)
    at += BT
    blocks = tl.load(table + page_of(at, PAGE), mask=at < end, other=0)
    slope = tl.zeros([GROUP_TILE], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + offs_g, mask=offs_g < GROUP, other=0.0)
    turned = field_turns(cos_sin, position + tl.zeros([GROUP_TILE], tl.int32), F, D, W, ROPE)
    if PDL and EARLY_ROWS:
        gdc_wait()

    fields, weight = attend_part(
        source, tile, table, loaded, seen, blocks, begin, end, part == count - 1, head, position, turned, cos_sin, eps,
        q_weight, k_weight, slope, scale, softcap, block_stride,
        KV_HEADS, GROUP, GROUP_TILE, F, D, W, PAGE, BT, ROPE, NORM, ALIBI, SOFTCAP, KV_FORMAT, QUERY, COMPUTE, PLAIN,
        STAGES,
    )  # fmt: skip
    target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)
    if count == 1:
        store_fields(target, fields, GROUP, GROUP_TILE, F, D, W)
    else:
        cell = head * programs + item
        leave_fields(parts, weights, cell, weight, fields, GROUP, GROUP_TILE, F, D, W)
        combine_last(
            parts, weights, target, arrived + row * KV_HEADS + head, cell - part, count,
            GROUP, GROUP_PARTS, D, DP, COMBINED,
        )  # fmt: skip
