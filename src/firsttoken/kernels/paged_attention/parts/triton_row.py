"""What decode attention does for one row: its queries, its new token, a tile of its keys."""

from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.paged_attention.triton import (
    decode_elements,
    finish_scores,
    load_heads,
    load_tile,
    load_turns,
    rotate,
)


@triton.jit
def turns(cos_sin, position, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr):
    """The position's cosines and sines for ``R`` heads. Every head loads its own: Triton 3.6 fails to compile some
    shapes where one row is broadcast to several heads."""
    if ROPE:
        everywhere = tl.full([R], 1, tl.int1)
        cos, sin = load_turns(cos_sin, position + tl.zeros([R], tl.int32), everywhere, tl.arange(0, DP), D, DP)
    else:
        cos, sin = 1.0, 0.0
    return cos, sin


@triton.jit
def load_queries(
    source,
    head,
    cos,
    sin,
    eps,
    q_weight,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
):
    """The group's query heads ``[R, DP]`` float32, normalised and rotated; zero past ``GROUP``."""
    offs_g = tl.arange(0, R)
    offs_d = tl.arange(0, DP)
    at = source + (head * GROUP + offs_g)[:, None] * D + offs_d[None, :]
    q = load_heads(at, (offs_g < GROUP)[:, None] & (offs_d < D)[None, :], eps, q_weight, offs_d, NORM, D)
    if ROPE:
        q = rotate(q, cos, sin, R, DP)
    return q


@triton.jit
def add_token(
    q,
    source,
    new_tile,
    head,
    position,
    cos_sin,
    eps,
    k_weight,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    VALUES: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Write the new token's K and V; its score for each query ``[R]`` and its V ``[R, DP]``, float32."""
    offs_d = tl.arange(0, DP)
    at = source + (KV_HEADS * GROUP + head) * D + offs_d
    k = load_heads(at[None, :], (offs_d < D)[None, :], eps, k_weight, offs_d, NORM, D)
    v = tl.load(at + KV_HEADS * D, mask=offs_d < D, other=0.0).to(new_tile.dtype.element_ty)
    if ROPE:
        cos, sin = turns(cos_sin, position, 1, D, DP, True)
        k = rotate(k, cos, sin, 1, DP)
    k = k.to(new_tile.dtype.element_ty)
    tl.store(new_tile + offs_d[None, :], k, mask=(offs_d < D)[None, :])
    tl.store(new_tile + VALUES + offs_d, v, mask=offs_d < D)
    # Its distance is 0, so ALiBi adds nothing.
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    own = finish_scores(own, 0, 0.0, scale, softcap, SOFTCAP, False)
    return own, tl.zeros([R, DP], tl.float32) + v.to(tl.float32)[None, :]


@triton.jit
def attend_keys(
    q,
    k,
    v,
    seen,
    blocks,
    begin,
    end,
    tile,
    table,
    position,
    block_stride,
    slope,
    scale,
    softcap,
    top,
    total,
    acc,
    VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DOT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the keys ``[begin, end)``, of which the first tile is loaded already (``k``, ``v``, which of
    them are ``seen``), and the ``blocks`` of the second."""
    offs_t = tl.arange(0, BT)
    top, total, acc = attend_tile(
        q, k, v, begin + offs_t, seen, position, slope, scale, softcap, top, total, acc,
        SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE,
    )  # fmt: skip
    for start in tl.range(begin + BT, end, BT, num_stages=STAGES):
        at = start + offs_t
        seen = at < end
        k = load_tile(tile, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
        v = load_tile(tile + VALUES, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
        # The next tile's blocks, a turn ahead: K and V then wait for no other load.
        blocks = tl.load(table + (at + BT) // PAGE, mask=at + BT < end, other=0)
        top, total, acc = attend_tile(
            q, k, v, at, seen, position, slope, scale, softcap, top, total, acc, SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE
        )
    return top, total, acc


@triton.jit
def attend_tile(
    q,
    k,
    v,
    at,
    seen,
    position,
    slope,
    scale,
    softcap,
    top,
    total,
    acc,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DOT: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One tile's step of the online softmax (Milakov and Gimelshein, 2018), in units of log2."""
    k = decode_elements(k, KV_FORMAT, COMPUTE)
    v = decode_elements(v, KV_FORMAT, COMPUTE)
    if DOT:
        raw = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        raw = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32), 2)
    scores = finish_scores(raw, (at - position)[None, :], slope[:, None], scale, softcap, SOFTCAP, ALIBI)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    grown = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - grown)
    p = tl.exp2(scores - grown[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if DOT:
        acc = tl.dot(p.to(COMPUTE), v, acc, input_precision="ieee")
    else:
        acc += tl.sum(p[:, :, None] * v.to(tl.float32), 1)
    return grown, total, acc
