"""What decode attention does for one row whose keys are kept in eight or four bits (`triton_row` for others).

Scales are never multiplied with elements: K's with the scores, V's with the softmax weights, and the least values of
int4 with the sum of q and of the weights. So products are of the elements as they are kept, which bfloat16 holds; what
makes K's quicker to unpack adds a constant to them, and is taken off with the sum of q.

Keys are the rows of both products, and query heads the columns, since a group has fewer heads than an instruction has
rows: eight columns waste half of what sixteen rows would. V is read with keys along its columns.
"""

# ruff: noqa: RUF005 - Triton joins tuples with a plus alone.
from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.paged_attention.parts.triton_combine import leave_part
from firsttoken.kernels.paged_attention.parts.triton_fields import (
    encode,
    field_turns,
    load_fields,
    load_scales,
    raised_by,
    store_vector,
    unpack,
    unpack_raised,
)
from firsttoken.kernels.paged_attention.triton import finish_scores, in_blocks, page_of


@triton.jit
def load_words(tile, blocks, at, seen, block_stride, PAGE: tl.constexpr, W: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Words of K ``[BT, W]`` and of V ``[W, BT]``, and the four factors of each key; zero where not ``seen``."""
    offs_w = tl.arange(0, W)
    own = in_blocks(tile, blocks, block_stride)
    # Tiles begin where a page does.
    place = tl.arange(0, at.shape[0]) % PAGE
    rows = own + place * W
    k = tl.load(rows[:, None] + offs_w[None, :], mask=seen[:, None], other=0)
    v = tl.load(rows[None, :] + PAGE * W + offs_w[:, None], mask=seen[None, :], other=0)
    ks, kz, vs, vz = load_scales(own, place, seen, PAGE, W, KV_FORMAT)
    return k, v, ks, kz, vs, vz


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def attend_words(
    q, q_sum, loaded, at, seen, position, slope, scale, softcap, state,
    GT: tl.constexpr, F: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, KV_FORMAT: tl.constexpr,
    PLAIN: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One tile's step of the online softmax; ``q [W, GT]`` a field, ``state`` is the top, the sum, what V's least
    values add ``[GT]``, and the fields ``[W, GT]``."""
    k, v, ks, kz, vs, vz = loaded
    top, total, base, acc = state
    keys = unpack_raised(k, KV_FORMAT, PLAIN)
    raw = tl.dot(keys[0], q[0], input_precision="ieee")
    for i in tl.static_range(1, F):
        raw = tl.dot(keys[i], q[i], raw, input_precision="ieee")
    RAISED: tl.constexpr = raised_by(KV_FORMAT)
    if RAISED != 0:
        raw -= RAISED * q_sum[None, :]
    raw *= ks[:, None]
    if KV_FORMAT == "int4":
        raw += q_sum[None, :] * kz[:, None]
    scores = finish_scores(raw, (at - position)[:, None], slope[None, :], scale, softcap, SOFTCAP, ALIBI)
    scores = tl.where(seen[:, None], scores, float("-inf"))
    grown = tl.maximum(top, tl.max(scores, 0))
    shrink = tl.exp2(top - grown)
    p = tl.exp2(scores - grown[None, :])
    if KV_FORMAT == "int4":
        # Both in one pass: each takes a barrier between the warps.
        part, least = tl.reduce((p, p * vz[:, None]), 0, _add_both)
        base = base * shrink + least
    else:
        part = tl.sum(p, 0)
    total = total * shrink + part
    weights = (p * vs[:, None]).to(COMPUTE)
    values = unpack(v, KV_FORMAT, PLAIN)
    mixed = ()
    for i in tl.static_range(F):
        mixed = mixed + (tl.dot(values[i], weights, acc[i] * shrink[None, :], input_precision="ieee"),)
    return grown, total, base, mixed


@triton.jit
def add_rounded_token(
    q, source, tile, head, position, cos_sin, eps, k_weight, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    PAGE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, KV_FORMAT: tl.constexpr,
):  # fmt: skip
    """Write the new token's K and V; its score for each query ``[R]`` and its V as it will be read, in fields."""
    one = tl.zeros([1], tl.int64)
    there = one == 0
    at = one.to(tl.int32) + position
    cos, sin = field_turns(cos_sin, at, F, D, W, ROPE)
    k_source = source + one + (KV_HEADS * GROUP + head) * D
    k = load_fields(k_source, there, cos, sin, eps, k_weight, F, D, 1, W, ROPE, NORM, KV_FORMAT == "int4")
    words, factor, zero, kept = encode(k, KV_FORMAT)
    store_vector(tile + one, at, words, factor, zero, there, 0, PAGE, W, KV_FORMAT)
    own = tl.sum(q[0].to(tl.float32) * kept[0], 1)
    for i in tl.static_range(1, F):
        own += tl.sum(q[i].to(tl.float32) * kept[i], 1)
    # Its distance is 0, so ALiBi adds nothing.
    own = finish_scores(own, 0, 0.0, scale, softcap, SOFTCAP, False)
    v = load_fields(k_source + KV_HEADS * D, there, 0, 0, eps, k_weight, F, D, 1, W, False, False, False)
    words, factor, zero, kept = encode(v, KV_FORMAT)
    store_vector(tile + one, at, words, factor, zero, there, 1, PAGE, W, KV_FORMAT)
    return own, kept


@triton.jit
def attend_part(
    source, tile, table, loaded, seen, blocks, begin, end, new, row_head, position, turned, cos_sin, eps, q_weight,
    k_weight, slope, scale, softcap, block_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GT: tl.constexpr, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    PAGE: tl.constexpr, BT: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, KV_FORMAT: tl.constexpr, QUERY: tl.constexpr, COMPUTE: tl.constexpr, PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys ``[begin, end)``, of which the first tile is ``loaded`` already, and the ``blocks``
    of the second; with ``new`` the row's new token, too. The normalised fields, and log2 of the softmax sum."""
    offs_t = tl.arange(0, BT)
    q, q_sum = load_queries(
        source, row_head, turned, eps, q_weight, GROUP, GT, F, D, W, ROPE, NORM, KV_FORMAT == "int4", QUERY
    )
    top = tl.full([GT], float("-inf"), tl.float32)
    total = tl.zeros([GT], tl.float32)
    base = tl.zeros([GT], tl.float32)
    acc = ()
    turned_q = ()
    for i in tl.static_range(F):
        acc = acc + (tl.zeros([W, GT], tl.float32),)
        turned_q = turned_q + (tl.trans(q[i]),)
    if new:
        block = tl.load(table + position // PAGE)
        top, values = add_rounded_token(
            q, source, tile + block.to(tl.int64) * block_stride, row_head, position, cos_sin, eps, k_weight, scale,
            softcap, KV_HEADS, GROUP, F, D, W, PAGE, ROPE, NORM, SOFTCAP, KV_FORMAT,
        )  # fmt: skip
        opened = ()
        for i in tl.static_range(F):
            opened = opened + (acc[i] + tl.trans(values[i]),)
        acc = opened
        total += 1.0
    top, total, base, acc = attend_words(
        turned_q, q_sum, loaded, begin + offs_t, seen, position, slope, scale, softcap, (top, total, base, acc),
        GT, F, SOFTCAP, ALIBI, KV_FORMAT, PLAIN, COMPUTE,
    )  # fmt: skip
    for start in tl.range(begin + BT, end, BT, num_stages=STAGES):
        at = start + offs_t
        inside = at < end
        tiles = load_words(tile, blocks, at, inside, block_stride, PAGE, W, KV_FORMAT)
        # The next tile's blocks, a turn ahead: K and V then wait for no other load.
        blocks = tl.load(table + page_of(at + BT, PAGE), mask=at + BT < end, other=0)
        top, total, base, acc = attend_words(
            turned_q, q_sum, tiles, at, inside, position, slope, scale, softcap, (top, total, base, acc),
            GT, F, SOFTCAP, ALIBI, KV_FORMAT, PLAIN, COMPUTE,
        )  # fmt: skip
    result = ()
    for i in tl.static_range(F):
        result = result + (tl.trans((acc[i] + base[None, :]) / total[None, :]),)
    return result, top + tl.log2(total)


@triton.jit
def load_queries(
    source, head, turned, eps, q_weight,
    GROUP: tl.constexpr, R: tl.constexpr, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROPE: tl.constexpr,
    NORM: tl.constexpr, SPREAD: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The group's query heads in the type of the products, ``[R, W]`` a field, and the sum of each ``[R]``."""
    offs_g = tl.arange(0, R)
    at = source + (head * GROUP + offs_g) * D
    wide = load_fields(at, offs_g < GROUP, turned[0], turned[1], eps, q_weight, F, D, R, W, ROPE, NORM, SPREAD)
    q = ()
    q_sum = tl.zeros([R], tl.float32)
    for i in tl.static_range(F):
        narrow = wide[i].to(COMPUTE)
        q = q + (narrow,)
        q_sum += tl.sum(narrow.to(tl.float32), 1)
    return q, q_sum


@triton.jit
def leave_fields(
    parts, weights, cell, weight, fields, GROUP: tl.constexpr, R: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """`triton_combine.leave_part`, a field at a time."""
    for i in tl.static_range(F):
        leave_part(parts + i * W, weights, cell, weight, fields[i], GROUP, R, D, W)


@triton.jit
def store_fields(
    target, fields, GROUP: tl.constexpr, R: tl.constexpr, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):
    """The group's heads ``[R, D]`` of a row that no other program has a part of."""
    offs_g, offs_w = tl.arange(0, R), tl.arange(0, W)
    for i in tl.static_range(F):
        at = target + i * W + offs_g[:, None] * D + offs_w[None, :]
        tl.store(at, fields[i].to(target.dtype.element_ty), mask=(offs_g < GROUP)[:, None])
