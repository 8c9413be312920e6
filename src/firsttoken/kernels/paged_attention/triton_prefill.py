"""Causal attention of prompt chunks over paged K and V, FlashAttention's way (Dao, 2023, "FlashAttention-2").

One program a (tile of query tokens, query head); with ``pack`` > 1 the heads of a group share the tile. Keys come in
tiles of whole pages; only tiles that some row sees in part are masked. The host lists tiles longest first, so that the
last programs to start are short.

K and V that a chunk has just brought are read from its own rows of the step's QKV, a tile in one copy by the hardware;
those before it come from the pages, row by row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.paged_attention.gpu_config import TILE_WORDS, PrefillConfig
from firsttoken.kernels.paged_attention.pages import PAGE, Pages, pages_of
from firsttoken.kernels.paged_attention.parts.triton_fields import decoded_tile, load_scales
from firsttoken.kernels.paged_attention.triton import (
    INTERPRETED,
    LOG2E,
    compute_type,
    decode_elements,
    finish_scores,
    kv_format_of,
)


def prefill(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    scale: float,
    config: PrefillConfig,
    slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    fresh: Tensor | None = None,
    rounded: str | None = None,
    pdl: bool = False,
) -> Tensor:
    """Attend from chunks of tokens whose K and V are in the cache already (`triton_write.write_kv`).

    ``q [T, Hq * D]`` normalised and rotated (row stride free), ``kv [blocks, layers, 2, Hkv, 16, D]`` contiguous,
    ``block_tables`` int32 ``[slots, W]``. ``tiles`` int32 ``[NT, 5]``, as `make_tiles` cuts them by
    ``config.tile_tokens``; a tile of 0 tokens is padding. Each query sees positions 0 to its own. Rows of
    ``out [T, Hq * D]`` in no tile are left alone. ``slopes``, ``window`` and ``softcap`` as for `triton_decode.decode`.

    ``fresh`` may be the QKV rows ``[T, (Hq + 2 Hkv) * D]`` of the same step, with rotated k (``keep_k``): full tiles of
    a chunk's own keys are then read from there. ``kv`` is ``rounded`` as for `triton_decode.decode`; its heads are
    multiplied as `write_kv` keeps them. Raises ValueError for shapes that do not fit.
    """
    pages = pages_of(kv, rounded)
    kv_heads, head_dim = pages.kv_heads, pages.head_dim
    group = num_heads // kv_heads
    _check(q, kv, pages, layer, tiles, out, num_heads, config, window, fresh)
    block = [config.block_n, head_dim]
    rows = TensorDescriptor.from_tensor(fresh, block) if fresh is not None else None
    launch(
        _prefill_kernel,
        (num_heads // config.pack, tiles.shape[0]),
        q,
        kv,
        rows,
        block_tables,
        tiles,
        slopes,
        out,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        kv.stride(0),
        layer * kv.stride(1),
        scale if softcap is not None else scale * LOG2E.value,
        softcap or 0.0,
        KV_HEADS=kv_heads,
        GROUP=group,
        PACK=config.pack,
        D=head_dim,
        DP=next_power_of_two(head_dim),
        PAGE=PAGE,
        BM=config.block_m,
        BN=config.block_n,
        WINDOW=window or 0,
        ALIBI=slopes is not None,
        SOFTCAP=softcap is not None,
        KV_FORMAT=rounded or kv_format_of(kv),
        COMPUTE=compute_type(kv),
        W=pages.words,
        TILE=pages.tile,
        PLAIN=INTERPRETED,
        FRESH=fresh is not None,
        WORDS=TILE_WORDS,
        STAGES=config.stages,
        pdl=pdl,
        num_warps=config.warps,
    )
    return out


def _check(
    q: Tensor,
    kv: Tensor,
    pages: Pages,
    layer: int,
    tiles: Tensor,
    out: Tensor,
    num_heads: int,
    config: PrefillConfig,
    window: int | None,
    fresh: Tensor | None,
) -> None:
    if not 0 <= layer < pages.layers:
        raise ValueError(f"kv must hold layer {layer}, got {tuple(kv.shape)}")
    kv_heads, head_dim = pages.kv_heads, pages.head_dim
    if num_heads % kv_heads or (num_heads // kv_heads) % config.pack:
        raise ValueError(
            f"{num_heads} query heads on {kv_heads} KV heads cannot be packed by {config.pack}: "
            "pack must divide the heads of a group"
        )
    columns = num_heads * head_dim
    for name, tensor in (("q", q), ("out", out)):
        if tensor.dim() != 2 or tensor.shape[1] != columns or tensor.stride(1) != 1:
            raise ValueError(f"{name} must be [T, {columns}] with contiguous rows, got {tuple(tensor.shape)}")
    if tiles.dim() != 2 or tiles.shape[1] != TILE_WORDS or not tiles.is_contiguous():
        raise ValueError(f"tiles must be contiguous [NT, {TILE_WORDS}], got {tuple(tiles.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least the token itself, got {window}")
    if fresh is None:
        return
    if fresh.shape[1] != columns + 2 * kv_heads * head_dim or fresh.dtype != (q if pages.words else kv).dtype:
        raise ValueError(f"fresh must hold whole QKV rows of {kv.dtype}, got {tuple(fresh.shape)} of {fresh.dtype}")
    if head_dim & (head_dim - 1):
        raise ValueError(f"fresh needs a head_dim that is a power of two, got {head_dim}: leave it out")


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _prefill_kernel(
    q_rows,
    kv,
    fresh,
    tables,
    tiles,
    slopes,
    out,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    layer_offset,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    PLAIN: tl.constexpr,
    FRESH: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    first_head = tl.program_id(0) * PACK
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    what = tiles + tl.program_id(1) * WORDS
    slot = tl.load(what)
    first_row = tl.load(what + 1)
    first_position = tl.load(what + 2)
    count = tl.load(what + 3)
    if count <= 0:
        return
    offs_m = tl.arange(0, BM)
    offs_d = tl.arange(0, DP)
    token = offs_m // PACK
    head = first_head + offs_m % PACK
    position = first_position + token
    whole = (token < count)[:, None] & (offs_d < D)[None, :]
    row = (first_row + token).to(tl.int64)
    q_at = q_rows + row[:, None] * q_stride + (head * D)[:, None] + offs_d[None, :]
    q = tl.load(q_at, mask=whole, other=0.0).to(COMPUTE)
    slope = tl.zeros([BM], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head)

    kv_head = first_head // GROUP
    table = tables + slot.to(tl.int64) * table_stride
    tile = kv + layer_offset + kv_head * (TILE if TILE else PAGE * D)
    end = first_position + count
    # Keys [low, end) matter; each row sees all of [inner, full), and some of the tiles before and after it.
    low = tl.maximum(first_position + 1 - WINDOW, 0) if WINDOW else 0
    begin = low // BN * BN
    full = (first_position + 1) // BN * BN
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    if WINDOW:
        inner = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BN) * BN, full)
        top, total, acc = _attend_range(
            q, tile, table, fresh, 0, 0, begin, inner, low, end, position, slope, block_stride, scale, softcap,
            top, total, acc, KV_HEADS, D, DP, PAGE, BN, WINDOW, ALIBI, SOFTCAP,
        KV_FORMAT, COMPUTE, W, PLAIN, True, False, STAGES,
        )  # fmt: skip
        begin = tl.maximum(begin, inner)
    # Of those that all rows see, the chunk's own come from its QKV rows.
    own = tl.minimum(tl.maximum(tl.cdiv(tl.load(what + 4), BN) * BN, begin), full) if FRESH else full
    top, total, acc = _attend_range(
        q, tile, table, fresh, 0, 0, begin, own, low, end, position, slope, block_stride, scale, softcap,
        top, total, acc, KV_HEADS, D, DP, PAGE, BN, WINDOW, ALIBI, SOFTCAP,
        KV_FORMAT, COMPUTE, W, PLAIN, False, False, STAGES,
    )  # fmt: skip
    if FRESH:
        top, total, acc = _attend_range(
            q, tile, table, fresh, first_row - first_position, (KV_HEADS * GROUP + kv_head) * D, own, full, low, end,
            position, slope, block_stride, scale, softcap, top, total, acc,
            KV_HEADS, D, DP, PAGE, BN, WINDOW, ALIBI, SOFTCAP, KV_FORMAT, COMPUTE, W, PLAIN, False, True, STAGES,
        )  # fmt: skip
    top, total, acc = _attend_range(
        q, tile, table, fresh, 0, 0, tl.maximum(begin, full), end, low, end,
        position, slope, block_stride, scale, softcap,
        top, total, acc, KV_HEADS, D, DP, PAGE, BN, WINDOW, ALIBI, SOFTCAP,
        KV_FORMAT, COMPUTE, W, PLAIN, True, False, STAGES,
    )  # fmt: skip
    acc = acc / total[:, None]
    out_at = out + row[:, None] * out_stride + (head * D)[:, None] + offs_d[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=whole)


@triton.jit
def _attend_range(
    q,
    tile,
    table,
    fresh,
    fresh_row,
    fresh_column,
    begin,
    stop,
    low,
    end,
    position,
    slope,
    block_stride,
    scale,
    softcap,
    top,
    total,
    acc,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    W: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    FRESH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over keys ``[begin, stop)``; ``MASKED`` where some row may not see some of them."""
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, DP)
    place = (offs_n % PAGE * D)[:, None] + offs_d[None, :]
    if not FRESH:
        at = begin + offs_n
        blocks = tl.load(table + at // PAGE, mask=(at >= low) & (at < tl.minimum(stop, end)), other=0)
    for start in tl.range(begin, stop, BN, num_stages=STAGES):
        at = start + offs_n
        if FRESH:
            k = fresh.load([fresh_row + start, fresh_column])
            v = fresh.load([fresh_row + start, fresh_column + KV_HEADS * D])
            k = k.to(COMPUTE)
            v = v.to(COMPUTE)
        elif KV_FORMAT != "native":
            held = (at >= low) & (at < end)
            own = tile + blocks.to(tl.int64) * block_stride
            words = own[:, None] + (at % PAGE * W)[:, None] + tl.arange(0, W)[None, :]
            k = tl.load(words, mask=held[:, None], other=0)
            v = tl.load(words + PAGE * W, mask=held[:, None], other=0)
            ks, kz, vs, vz = load_scales(own, at, held, PAGE, W, KV_FORMAT)
            ahead = at + BN
            blocks = tl.load(table + ahead // PAGE, mask=ahead < tl.minimum(stop, end), other=0)
            k = decoded_tile(k, ks, kz, KV_FORMAT, PLAIN, COMPUTE)
            v = decoded_tile(v, vs, vz, KV_FORMAT, PLAIN, COMPUTE)
        else:
            pages = tile + blocks.to(tl.int64)[:, None] * block_stride + place
            if MASKED:
                # Past its end a page may hold NaN of an earlier owner, which no zero weight would hide.
                held = ((at >= low) & (at < end))[:, None] & (offs_d < D)[None, :]
                k = tl.load(pages, mask=held, other=0.0)
                v = tl.load(pages + KV_HEADS * PAGE * D, mask=held, other=0.0)
            elif D == DP:
                k = tl.load(pages)
                v = tl.load(pages + KV_HEADS * PAGE * D)
            else:
                k = tl.load(pages, mask=(offs_d < D)[None, :], other=0.0)
                v = tl.load(pages + KV_HEADS * PAGE * D, mask=(offs_d < D)[None, :], other=0.0)
            # The next tile's blocks, a turn ahead: K and V then wait for no other load.
            ahead = at + BN
            blocks = tl.load(table + ahead // PAGE, mask=ahead < tl.minimum(stop, end), other=0)
            k = decode_elements(k, KV_FORMAT, COMPUTE)
            v = decode_elements(v, KV_FORMAT, COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        unit = scale
        if ALIBI or SOFTCAP:
            distance = at[None, :] - position[:, None]
            scores = finish_scores(scores, distance, slope[:, None], scale, softcap, SOFTCAP, ALIBI)
            unit = 1.0
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(top, tl.max(scores, 1) * unit)
        # Under a window a row may see nothing of its first tiles: keep its weights zero, not NaN.
        level = tl.where(grown == float("-inf"), 0.0, grown) if MASKED and WINDOW else grown
        shrink = tl.exp2(top - level)
        p = tl.exp2(scores * unit - level[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(COMPUTE), v, acc, input_precision="ieee")
        top = grown
    return top, total, acc
