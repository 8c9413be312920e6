"""Decode attention in one kernel: QK norm, RoPE, the write of the new K and V, and split-KV attention over pages.

One program a (token row, KV head, split): the query heads of a group share every K and V they load. The row's own
length says on the device how many splits have work (Flash-Decoding: Dao et al., 2023), so that one captured graph
serves any context; the others leave at once. The last split that has work also owns the new token: it writes its K and
V, which enter its softmax from registers.

Splits meet in the same kernel, in fixed order, by one of two ways. ``counter``: each stores its part, then adds to a
counter; who comes last combines and resets the counter. ``words``: the parts' words start out as a bit pattern that no
result has, the last split reads them until none is left (as the low-latency protocols of NCCL do with flags) and resets
them. That saves the fence and the atomic's round trip. The reader's grid index is higher than those it waits for, and
the hardware starts programs in that order, so whoever is waited for is already running.

Under dependent launch everything older than the chain of running kernels (cached K and V, tables, and the rows' slots
and positions if ``early_rows``) is fetched before the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.paged_attention.gpu_config import DecodeConfig, next_power_of_two
from firsttoken.kernels.paged_attention.triton import (
    INTERPRETED,
    LOG2E,
    combine_parts,
    compute_type,
    decode_elements,
    finish_scores,
    kv_format_of,
    load_heads,
    load_turns,
    part_bits,
    rotate,
)

# Elements of the parts that one combining program holds at once, for 4 warps.
_COMBINED = 16384


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWorkspace:
    """Where splits leave their parts: one for all layers of a step, never shared by two streams.

    ``parts [2, rows * kv_heads, splits, group, head_dim]`` and ``weights [2, rows * kv_heads, splits, group]`` (log2 of
    each part's softmax sum), flat, hold float32 bits as int32; ``arrived`` is int32 ``[rows * kv_heads]``. The first
    half of parts and weights serves ``words``, the second ``counter``, so that configs of both kinds can share a
    workspace. At rest all bits of the first halves are set, and the counters are zero.
    """

    parts: Tensor
    weights: Tensor
    arrived: Tensor

    @classmethod
    def allocate(
        cls, config: DecodeConfig, rows: int, num_heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """Room for ``rows`` token rows under ``config``; with one split nothing is needed and little is taken."""
        group = num_heads // kv_heads
        cells = 2 * (rows * kv_heads * config.splits * group if config.splits > 1 else 1)
        parts = torch.full((cells * head_dim,), -1, dtype=torch.int32, device=device)
        weights = torch.full((cells,), -1, dtype=torch.int32, device=device)
        arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
        return cls(parts, weights, arrived)


def decode(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    scale: float,
    cos_sin: Tensor | None,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
    slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    pdl: bool = False,
    early_rows: bool = False,
) -> Tensor:
    """Attend from one new token a row to its context, and put the token's K and V in the cache.

    ``qkv [T, (Hq + 2 Hkv) * D]`` is the raw projection (row stride free), q and k in pair order. ``kv`` is the pool
    ``[blocks, layers, 2, Hkv, 16, D]``, contiguous, bfloat16 or float32. ``block_tables`` int32 ``[slots, W]``;
    ``slots`` and ``positions`` int32 ``[T]``, a row's position is that of its new token, -1 for a padding row, which
    reads and writes nothing. No two rows may have the same slot. ``out [T, Hq * D]``.

    ``scale`` multiplies the scores; ``cos_sin`` float32 ``[max positions, D / 2, 2]`` or None for no RoPE;
    ``qk_norm`` is (q weight, k weight, eps), weights float32 ``[D]`` in pair order; ``slopes`` float32 ``[Hq]`` for
    ALiBi; ``window`` counts the keys a token sees, its own included; ``softcap`` is Gemma 2's. ``pdl`` launches
    dependently; ``early_rows`` promises that tables, slots and positions are older than every kernel still running.

    Raises ValueError for shapes or types that do not fit together.
    """
    rows, kv_heads, head_dim = slots.shape[0], kv.shape[3], kv.shape[5]
    _check(qkv, kv, layer, positions, out, num_heads, workspace, config, window)
    group = num_heads // kv_heads
    group_tile = next_power_of_two(group)
    padded_dim = next_power_of_two(head_dim)
    combined = min(config.splits, max(1, _COMBINED * config.warps // 4 // (group_tile * padded_dim)))
    # Each way to combine has its half, for they leave it in different states.
    half = 0 if config.combine == "words" else workspace.weights.shape[0] // 2
    q_weight, k_weight, eps = qk_norm if qk_norm is not None else (None, None, 0.0)
    options: dict[str, int | bool] = {"launch_pdl": True} if pdl else {}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    _decode_kernel[(kv_heads, rows, config.splits)](
        qkv,
        kv,
        block_tables,
        slots,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        slopes,
        out,
        workspace.parts[half * head_dim :],
        workspace.weights[half:],
        workspace.arrived,
        qkv.stride(0),
        out.stride(0),
        block_tables.stride(0),
        kv.stride(0),
        layer * kv.stride(1),
        eps,
        scale if softcap is not None else scale * LOG2E.value,
        softcap or 0.0,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_TILE=max(16, group_tile) if config.dot else group_tile,
        GROUP_PARTS=group_tile,
        D=head_dim,
        DP=padded_dim,
        PAGE=kv.shape[4],
        BT=config.block_tokens,
        SPLITS=config.splits,
        MIN_SPLIT=config.min_split,
        COMBINED=next_power_of_two(combined + 1) // 2,
        WINDOW=window or 0,
        ROPE=cos_sin is not None,
        NORM=qk_norm is not None,
        ALIBI=slopes is not None,
        SOFTCAP=softcap is not None,
        DOT=config.dot,
        WORDS=config.combine == "words",
        KV_FORMAT=kv_format_of(kv),
        COMPUTE=compute_type(kv),
        STAGES=config.stages,
        COMPILED=not INTERPRETED,
        PDL=pdl and not INTERPRETED,
        EARLY_ROWS=early_rows,
        num_warps=config.warps,
        **options,
    )
    return out


def _check(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    positions: Tensor,
    out: Tensor,
    num_heads: int,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    window: int | None,
) -> None:
    if kv.dim() != 6 or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous [blocks, layers, 2, kv_heads, 16, head_dim], got {tuple(kv.shape)}")
    _, layers, _, kv_heads, _, head_dim = kv.shape
    rows = positions.shape[0]
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is not in a pool of {layers} layers")
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotated pairs, got {head_dim}")
    if qkv.shape != (rows, (num_heads + 2 * kv_heads) * head_dim) or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must be [{rows}, {(num_heads + 2 * kv_heads) * head_dim}] with contiguous rows, "
            f"got {tuple(qkv.shape)} with strides {qkv.stride()}"
        )
    if out.shape != (rows, num_heads * head_dim) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {num_heads * head_dim}] with contiguous rows, got {tuple(out.shape)}")
    room, needed = workspace.weights.shape[0] // 2, rows * num_heads * config.splits
    if config.splits > 1 and (room < needed or workspace.arrived.shape[0] < rows * kv_heads):
        raise ValueError(
            f"the workspace has room for {room} parts and {workspace.arrived.shape[0]} counters, {needed} and "
            f"{rows * kv_heads} are needed: allocate it with this config and number of rows"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least the token itself, got {window}")


@triton.jit
def _decode_kernel(
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
    WORDS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
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
    # Keys before the new token: [first, position), read from the page boundary below.
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    base = first // PAGE * PAGE
    share = tl.cdiv(tl.cdiv(position - base, SPLITS), BT) * BT
    share = tl.maximum(share, MIN_SPLIT)
    active = tl.maximum(tl.cdiv(position - base, share), 1)
    if (position < 0) | (split >= active):
        # Waiting keeps the chain of dependent launches whole, also for a program that needs nothing.
        if PDL and EARLY_ROWS:
            gdc_wait()
        return
    begin = base + split * share
    end = tl.minimum(begin + share, position)
    newest = split == active - 1

    table = tables + slot.to(tl.int64) * table_stride
    tile = kv + layer_offset + head * (PAGE * D)
    VALUES: tl.constexpr = KV_HEADS * PAGE * D
    offs_d = tl.arange(0, DP)
    offs_t = tl.arange(0, BT)
    at = begin + offs_t
    seen = (at < end) & (at >= first)
    blocks = tl.load(table + at // PAGE, mask=seen, other=0)
    k = _load_tile(tile, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
    v = _load_tile(tile + VALUES, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
    at += BT
    blocks = tl.load(table + at // PAGE, mask=at < end, other=0)
    new_block = tl.load(table + position // PAGE)

    offs_g = tl.arange(0, GROUP_TILE)
    heads_in = offs_g < GROUP
    if ROPE:
        cos, sin = load_turns(cos_sin, position + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), offs_d, D, DP)
    slope = tl.zeros([GROUP_TILE], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + offs_g, mask=heads_in, other=0.0)
    if PDL and EARLY_ROWS:
        gdc_wait()

    source = qkv + row.to(tl.int64) * qkv_stride
    whole = heads_in[:, None] & (offs_d < D)[None, :]
    new_in = newest & (offs_d < D)
    q_at = source + (head * GROUP + offs_g)[:, None] * D + offs_d[None, :]
    q = load_heads(q_at, whole, eps, q_weight, offs_d, NORM, D)
    new_at = source + (KV_HEADS * GROUP + head) * D + offs_d
    new_k = load_heads(new_at[None, :], new_in[None, :], eps, k_weight, offs_d, NORM, D)
    new_v = tl.load(new_at + KV_HEADS * D, mask=new_in, other=0.0).to(kv.dtype.element_ty)
    if ROPE:
        q = rotate(q, cos, sin, GROUP_TILE, DP)
        new_k = rotate(new_k, cos, sin, 1, DP)
    q = q.to(COMPUTE)
    new_k = new_k.to(kv.dtype.element_ty)

    new_tile = tile + new_block.to(tl.int64) * block_stride + (position % PAGE) * D
    tl.store(new_tile + offs_d[None, :], new_k, mask=new_in[None, :])
    tl.store(new_tile + VALUES + offs_d, new_v, mask=new_in)

    # The new token opens the softmax of the split that owns it; elsewhere it weighs nothing.
    own = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1)
    own = finish_scores(own, tl.zeros([1], tl.int32), slope, scale, softcap, SOFTCAP, False)
    top = tl.where(newest, own, float("-inf"))
    total = tl.zeros([GROUP_TILE], tl.float32) + newest.to(tl.float32)
    acc = tl.zeros([GROUP_TILE, DP], tl.float32) + new_v.to(tl.float32)[None, :]

    at = begin + offs_t
    top, total, acc = _attend_tile(
        q, k, v, at, seen, position, slope, scale, softcap, top, total, acc, SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE
    )
    for start in tl.range(begin + BT, end, BT, num_stages=STAGES):
        at = start + offs_t
        seen = at < end
        k = _load_tile(tile, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
        v = _load_tile(tile + VALUES, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
        # The next tile's blocks, a turn ahead: K and V then wait for no other load.
        blocks = tl.load(table + (at + BT) // PAGE, mask=at + BT < end, other=0)
        top, total, acc = _attend_tile(
            q, k, v, at, seen, position, slope, scale, softcap, top, total, acc, SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE
        )
    acc = acc / total[:, None]

    target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)
    if SPLITS == 1:
        tl.store(target + offs_g[:, None] * D + offs_d[None, :], acc.to(out.dtype.element_ty), mask=whole)
    else:
        if active == 1:
            tl.store(target + offs_g[:, None] * D + offs_d[None, :], acc.to(out.dtype.element_ty), mask=whole)
        else:
            cell = (row * KV_HEADS + head) * SPLITS
            weight = top + tl.log2(total)
            mine = (cell + split) * GROUP + offs_g
            tl.store(weights + mine, part_bits(weight), mask=heads_in)
            tl.store(parts + mine.to(tl.int64)[:, None] * D + offs_d[None, :], part_bits(acc), mask=whole)
            if WORDS:
                combines = newest
            else:
                tl.debug_barrier()
                before = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
                combines = before == active - 1
            if combines:
                if not WORDS:
                    tl.store(arrived + row * KV_HEADS + head, 0)
                combine_parts(
                    parts, weights, target, cell, active, GROUP, GROUP_PARTS, D, DP, SPLITS, COMBINED, WORDS, COMPILED
                )


@triton.jit
def _load_tile(
    tile, blocks, at, seen, block_stride, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DOT: tl.constexpr
):
    """K or V as stored, ``[BT, DP]`` or for CUDA cores ``[1, BT, DP]``; zero where not ``seen``: what an earlier owner
    left there may be NaN.

    The third dimension gives the loads the layout in which they are multiplied, so that nothing moves between threads.
    """
    offs_d = tl.arange(0, DP)
    rows = tile + blocks.to(tl.int64) * block_stride + at % PAGE * D
    if DOT:
        pointers, mask = rows[:, None] + offs_d[None, :], seen[:, None]
        if D != DP:
            mask = mask & (offs_d < D)[None, :]
    else:
        pointers, mask = rows[None, :, None] + offs_d[None, None, :], seen[None, :, None]
        if D != DP:
            mask = mask & (offs_d < D)[None, None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _attend_tile(
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
