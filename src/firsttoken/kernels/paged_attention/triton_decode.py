"""Decode attention in one kernel: QK norm, RoPE, the write of the new K and V, and split-KV attention over pages.

One program a (token row, KV head, split): the query heads of a group share every K and V they load. The row's own
length says on the device how many splits have work (Flash-Decoding: Dao et al., 2023), so that one captured graph
serves any context; the others leave at once. A program of its own writes the new token's K and V and takes part as one
more split, so that nothing is added to the others' way; a row of one split does all in one program.

Splits meet in the same kernel, in fixed order, by one of two ways. ``counter``: each stores its part, then adds to a
counter; who comes last combines and resets the counter. ``words``: the parts' words start out as a bit pattern that no
result has; the new token's program reads them until none is left (as the low-latency protocols of NCCL do with flags)
and resets them. That saves the fence and the atomic's round trip. The reader's grid index is higher than those it waits
for, and the hardware starts programs in that order, so whoever is waited for is already running.

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

from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.paged_attention.gpu_config import DecodeConfig
from firsttoken.kernels.paged_attention.parts.triton import combine_last, combine_parts, leave_part
from firsttoken.kernels.paged_attention.triton import (
    INTERPRETED,
    LOG2E,
    compute_type,
    decode_elements,
    finish_scores,
    kv_format_of,
    load_heads,
    load_tile,
    load_turns,
    rotate,
)

# Elements of the parts that a combining program holds at once, a warp: 64 a thread.
_COMBINED = 2048


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWorkspace:
    """Where splits leave their parts: one for all layers of a step, never shared by two streams.

    ``parts [2, rows * kv_heads, 2 * splits, group, head_dim]`` and ``weights [2, rows * kv_heads, 2 * splits, group]``
    (log2 of a part's softmax sum), flat, hold float32 bits as int32; ``arrived`` is int32 ``[rows * kv_heads]``. Of
    parts and weights the first half serves ``words``, the second ``counter``, so that configs of both kinds can share
    a workspace. At rest all bits of the first halves are set, and the counters are zero.
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
        # Beside the splits' parts comes the new token's.
        cells = 2 * (rows * kv_heads * 2 * config.splits * group if config.splits > 1 else 4)
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
    combined = min(config.splits, max(1, _COMBINED * config.warps // (group_tile * padded_dim)))
    combined = next_power_of_two(combined + 1) // 2
    # Each way to combine has its half, for they leave it in different states.
    half = 0 if config.combine == "words" else workspace.weights.shape[0] // 2
    q_weight, k_weight, eps = qk_norm if qk_norm is not None else (None, None, 0.0)
    options = {"maxnreg": config.max_registers} if config.max_registers is not None else {}
    programs = config.splits + 1 if config.splits > 1 else 1
    launch(
        _decode_kernel,
        (kv_heads, rows, programs),
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
        COMBINED=combined,
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
        # A thread loads four neighbours: with fewer elements than that, threads double up.
        COPIES=combined * group_tile * padded_dim < 4 * 32 * config.warps,
        EARLY_ROWS=early_rows,
        pdl=pdl,
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
    room, needed = workspace.weights.shape[0] // 2, rows * num_heads * (config.splits + 1)
    if config.splits > 1 and (room < needed or workspace.arrived.shape[0] < rows * kv_heads):
        raise ValueError(
            f"the workspace has room for {room} parts and {workspace.arrived.shape[0]} counters, {needed} and "
            f"{rows * kv_heads} are needed: allocate it with this config and number of rows"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least the token itself, got {window}")


# Views into a step's row arrays begin anywhere: one variant serves them all.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
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
    COPIES: tl.constexpr,
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
        cos, sin = _turns(cos_sin, position, GROUP_PARTS, D, DP, ROPE)
        if PDL and EARLY_ROWS:
            gdc_wait()
        q = _load_queries(source, head, cos, sin, eps, q_weight, GROUP, GROUP_PARTS, D, DP, ROPE, NORM).to(COMPUTE)
        own, new_v = _add_token(
            q, source, new_tile, head, position, cos_sin, eps, k_weight, scale, softcap,
            KV_HEADS, GROUP, GROUP_PARTS, VALUES, D, DP, ROPE, NORM, SOFTCAP,
        )  # fmt: skip
        target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)
        if WORDS:
            combine_parts(
                parts, weights, target, cell, active, own, new_v,
                GROUP, GROUP_PARTS, D, DP, SPLITS, COMBINED, True, COMPILED, COPIES,
            )  # fmt: skip
        else:
            leave_part(parts, weights, cell + active, own, new_v, GROUP, GROUP_PARTS, D, DP)
            combine_last(
                parts, weights, target, counter, cell, active,
                GROUP, GROUP_PARTS, D, DP, SPLITS, COMBINED,
            )  # fmt: skip
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
    cos, sin = _turns(cos_sin, position, GROUP_TILE, D, DP, ROPE)
    if PDL and EARLY_ROWS:
        gdc_wait()

    q = _load_queries(source, head, cos, sin, eps, q_weight, GROUP, GROUP_TILE, D, DP, ROPE, NORM).to(COMPUTE)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DP], tl.float32)
    if active == 1:
        # Alone with the row: the new token opens the softmax.
        top, acc = _add_token(
            q, source, new_tile, head, position, cos_sin, eps, k_weight, scale, softcap,
            KV_HEADS, GROUP, GROUP_TILE, VALUES, D, DP, ROPE, NORM, SOFTCAP,
        )  # fmt: skip
        total += 1.0
    at = begin + offs_t
    top, total, acc = _attend_tile(
        q, k, v, at, seen, position, slope, scale, softcap, top, total, acc, SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE
    )
    for start in tl.range(begin + BT, end, BT, num_stages=STAGES):
        at = start + offs_t
        seen = at < end
        k = load_tile(tile, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
        v = load_tile(tile + VALUES, blocks, at, seen, block_stride, PAGE, D, DP, DOT)
        # The next tile's blocks, a turn ahead: K and V then wait for no other load.
        blocks = tl.load(table + (at + BT) // PAGE, mask=at + BT < end, other=0)
        top, total, acc = _attend_tile(
            q, k, v, at, seen, position, slope, scale, softcap, top, total, acc, SOFTCAP, ALIBI, DOT, KV_FORMAT, COMPUTE
        )
    acc = acc / total[:, None]
    target = out + row.to(tl.int64) * out_stride + head * (GROUP * D)
    if active == 1:
        whole = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
        tl.store(target + offs_g[:, None] * D + offs_d[None, :], acc.to(out.dtype.element_ty), mask=whole)
    elif SPLITS > 1:
        leave_part(parts, weights, cell + split, top + tl.log2(total), acc, GROUP, GROUP_TILE, D, DP)
        if not WORDS:
            combine_last(
                parts, weights, target, counter, cell, active,
                GROUP, GROUP_PARTS, D, DP, SPLITS, COMBINED,
            )  # fmt: skip


@triton.jit
def _turns(cos_sin, position, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr):
    """The position's cosines and sines for ``R`` heads. Every head loads its own: Triton 3.6 fails to compile some
    shapes where one row is broadcast to several heads."""
    if ROPE:
        everywhere = tl.full([R], 1, tl.int1)
        cos, sin = load_turns(cos_sin, position + tl.zeros([R], tl.int32), everywhere, tl.arange(0, DP), D, DP)
    else:
        cos, sin = 1.0, 0.0
    return cos, sin


@triton.jit
def _load_queries(
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
def _add_token(
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
        cos, sin = _turns(cos_sin, position, 1, D, DP, True)
        k = rotate(k, cos, sin, 1, DP)
    k = k.to(new_tile.dtype.element_ty)
    tl.store(new_tile + offs_d[None, :], k, mask=(offs_d < D)[None, :])
    tl.store(new_tile + VALUES + offs_d, v, mask=offs_d < D)
    # Its distance is 0, so ALiBi adds nothing.
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    own = finish_scores(own, 0, 0.0, scale, softcap, SOFTCAP, False)
    return own, tl.zeros([R, DP], tl.float32) + v.to(tl.float32)[None, :]


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
