"""Decode attention for few rows: split-KV over pages, each row cut into as many parts as its length bears.

One program a (token row, KV head, split): the query heads of a group share every K and V they load. The row's own
length says on the device how many splits have work (Flash-Decoding: Dao et al., 2023), so that one captured graph
serves any context; the others leave at once. A program of its own writes the new token's K and V and takes part as one
more split, so that nothing is added to the others' way; a row of one split does all in one program.

Under dependent launch everything older than the chain of running kernels (cached K and V, tables, and the rows' slots
and positions if ``EARLY_ROWS``) is fetched before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.paged_attention.parts.triton_combine import combine_last, leave_part
from firsttoken.kernels.paged_attention.parts.triton_row import add_token, attend_keys, load_queries, turns
from firsttoken.kernels.paged_attention.triton import load_tile


@triton.jit
def cut_row(
    position, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, WINDOW: tl.constexpr
):
    """Keys before the new token are [first, position), read from the page boundary ``base`` below, ``share`` of them by
    each of the ``active`` splits."""
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    base = first // PAGE * PAGE
    share = tl.cdiv(tl.cdiv(position - base, SPLITS), BT) * BT
    share = tl.maximum(share, MIN_SPLIT)
    return first, base, share, tl.maximum(tl.cdiv(position - base, share), 1)


# Views into a step's row arrays begin anywhere: one variant serves them all.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def split_kernel(
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
    DOT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
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
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    first, base, share, active = cut_row(position, SPLITS, MIN_SPLIT, PAGE, BT, WINDOW)
    if (position < 0) | (split > active) | ((active == 1) & (split == 1)):
        # Waiting keeps the chain of dependent launches whole, also for a program that needs nothing.
        if PDL and EARLY_ROWS:
            gdc_wait()
        return

    table = tables + slot.to(tl.int64) * table_stride
    tile = kv + layer_offset + head * (PAGE * D)
    source = qkv + row.to(tl.int64) * qkv_stride
    cell = (row * KV_HEADS + head) * (SPLITS + 1)
    counter = arrived + row * KV_HEADS + head
    VALUES: tl.constexpr = KV_HEADS * PAGE * D
    offs_d = tl.arange(0, DP)
    new_block = tl.load(table + position // PAGE)
    new_tile = tile + new_block.to(tl.int64) * block_stride + (position % PAGE) * D

    if SPLITS > 1 and split == active:
        # The program of the new token.
        cos, sin = turns(cos_sin, position, GROUP_PARTS, D, DP, ROPE)
        if PDL and EARLY_ROWS:
            gdc_wait()
        q = load_queries(source, head, cos, sin, eps, q_weight, GROUP, GROUP_PARTS, D, DP, ROPE, NORM).to(COMPUTE)
        own, new_v = add_token(
            q, source, new_tile, head, position, cos_sin, eps, k_weight, scale, softcap,
            KV_HEADS, GROUP, GROUP_PARTS, VALUES, D, DP, ROPE, NORM, SOFTCAP,
        )  # fmt: skip
        target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)
        leave_part(parts, weights, cell + active, own, new_v, GROUP, GROUP_PARTS, D, DP)
        combine_last(parts, weights, target, counter, cell, active + 1, GROUP, GROUP_PARTS, D, DP, COMBINED)
        return

    begin = base + split * share
    end = tl.minimum(begin + share, position)
    offs_t = tl.arange(0, BT)
    at = begin + offs_t
    seen = (at < end) & (at >= first)
    blocks = tl.load(table + at // PAGE, mask=seen, other=0)
    k = load_tile(tile, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
    v = load_tile(tile + VALUES, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
    at += BT
    blocks = tl.load(table + at // PAGE, mask=at < end, other=0)
    offs_g = tl.arange(0, GROUP_TILE)
    slope = tl.zeros([GROUP_TILE], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + offs_g, mask=offs_g < GROUP, other=0.0)
    cos, sin = turns(cos_sin, position, GROUP_TILE, D, DP, ROPE)
    if PDL and EARLY_ROWS:
        gdc_wait()

    q = load_queries(source, head, cos, sin, eps, q_weight, GROUP, GROUP_TILE, D, DP, ROPE, NORM).to(COMPUTE)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DP], tl.float32)
    if active == 1:
        # Alone with the row: the new token opens the softmax.
        top, acc = add_token(
            q, source, new_tile, head, position, cos_sin, eps, k_weight, scale, softcap,
            KV_HEADS, GROUP, GROUP_TILE, VALUES, D, DP, ROPE, NORM, SOFTCAP,
        )  # fmt: skip
        total += 1.0
    top, total, acc = attend_keys(
        q, k, v, seen, blocks, begin, end, tile, table, position, block_stride, slope, scale, softcap, top, total, acc,
        VALUES, PAGE, BT, D, DP, SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE, STAGES,
    )  # fmt: skip
    acc = acc / total[:, None]
    target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)
    if active == 1:
        whole = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
        tl.store(target + offs_g[:, None] * D + offs_d[None, :], acc.to(out.dtype.element_ty), mask=whole)
    elif SPLITS > 1:
        leave_part(parts, weights, cell + split, top + tl.log2(total), acc, GROUP, GROUP_TILE, D, DP)
        combine_last(parts, weights, target, counter, cell, active + 1, GROUP, GROUP_PARTS, D, DP, COMBINED)
