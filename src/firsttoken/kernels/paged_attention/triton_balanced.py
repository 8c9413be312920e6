"""Decode attention for many rows: the keys of all rows are dealt out evenly over a fixed number of programs.

Rows of a batch differ in length by a factor of thirty, and an SM that gets several long ones holds up the layer. So
a share of keys is worked out on the device: the smallest, in whole tiles, with which the parts of all rows are no more
than the programs of a KV head (Stream-K's idea for products: Osama et al., 2023). Each program finds its row and part
by a running sum over the rows' numbers of parts. One captured graph serves any lengths, and nobody leaves without work
but the last few. The row's last part writes the new token's K and V and takes it in.

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


# Views into a step's row arrays begin anywhere, and rows and programs come in many numbers: one variant serves all.
@triton.jit(do_not_specialize=["rows", "programs"], do_not_specialize_on_alignment=["slots", "positions"])
def balanced_kernel(
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
    DOT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
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
    row, position, share, part, count = find_part(positions, item, rows, programs, ROWS, MIN_SHARE, PAGE, BT, WINDOW)
    if row >= rows:
        # Waiting keeps the chain of dependent launches whole, also for a program that needs nothing.
        if PDL and EARLY_ROWS:
            gdc_wait()
        return

    slot = tl.load(slots + row)
    table = tables + slot.to(tl.int64) * table_stride
    tile = kv + layer_offset + head * (PAGE * D)
    source = qkv + row.to(tl.int64) * qkv_stride
    VALUES: tl.constexpr = KV_HEADS * PAGE * D
    offs_d = tl.arange(0, DP)
    offs_t = tl.arange(0, BT)
    offs_g = tl.arange(0, GROUP_TILE)
    # Keys before the new token: [first, position), read from the page boundary below.
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    begin = first // PAGE * PAGE + part * share
    end = tl.minimum(begin + share, position)
    at = begin + offs_t
    seen = (at < end) & (at >= first)
    blocks = tl.load(table + at // PAGE, mask=seen, other=0)
    k = load_tile(tile, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
    v = load_tile(tile + VALUES, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
    at += BT
    blocks = tl.load(table + at // PAGE, mask=at < end, other=0)
    slope = tl.zeros([GROUP_TILE], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + offs_g, mask=offs_g < GROUP, other=0.0)
    cos, sin = turns(cos_sin, position, GROUP_TILE, D, DP, ROPE)
    if PDL and EARLY_ROWS:
        gdc_wait()

    q = load_queries(source, head, cos, sin, eps, q_weight, GROUP, GROUP_TILE, D, DP, ROPE, NORM)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DP], tl.float32)
    q = q.to(COMPUTE)
    if part == count - 1:
        new_block = tl.load(table + position // PAGE)
        new_tile = tile + new_block.to(tl.int64) * block_stride + (position % PAGE) * D
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
    if count == 1:
        whole = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
        tl.store(target + offs_g[:, None] * D + offs_d[None, :], acc.to(out.dtype.element_ty), mask=whole)
    else:
        cell = head * programs + item
        leave_part(parts, weights, cell, top + tl.log2(total), acc, GROUP, GROUP_TILE, D, DP)
        combine_last(
            parts, weights, target, arrived + row * KV_HEADS + head, cell - part, count,
            GROUP, GROUP_PARTS, D, DP, COMBINED,
        )  # fmt: skip


@triton.jit
def find_part(
    positions,
    item,
    rows,
    programs,
    ROWS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The row whose part is the ``item``-th of all (``rows`` or more: there is none), its position, the keys of a
    part, which of the row's parts it is, and how many the row has.

    With ``share >= total / (programs - rows)`` the parts are at most ``total / share + rows <= programs``.
    """
    offs = tl.arange(0, ROWS)
    position = tl.load(positions + offs, mask=offs < rows, other=-1)
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    keys = tl.maximum(position - first // PAGE * PAGE, 0)
    share = tl.cdiv(tl.cdiv(tl.sum(keys), programs - rows), BT) * BT
    share = tl.maximum(share, MIN_SHARE)
    count = tl.where(position < 0, 0, tl.maximum(tl.cdiv(keys, share), 1))
    ends = tl.cumsum(count)
    row = tl.sum((ends <= item).to(tl.int32))
    mine = offs == row
    own = tl.sum(tl.where(mine, count, 0))
    part = item - tl.sum(tl.where(mine, ends - count, 0))
    return tl.where(row < ROWS, row, rows), tl.sum(tl.where(mine, position, 0)), share, part, own
