"""The GPU kernels' contracts in float64 torch: raw QKV rows, paged K and V, block tables, positions, one call a kernel.

Works on any device and for every option at once, one request at a time; the fast kernels are tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention.pages import PAGE, Pages, pages_of
from firsttoken.kernels.paged_attention.rounded import TileLayout, decode, encode, spread, spreads_keys


def write_kv(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    cos_sin: Tensor | None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
    rounded: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q and k, write K and V of rows with a position >= 0 into ``kv``.

    Returns float64 ``q [T, Hq, D]`` and ``k [T, Hkv, D]``, of a ``rounded`` pool as they are multiplied, before they
    are rounded. Arguments as for `triton_write.write_kv`.
    """
    pages = pages_of(kv, rounded)
    kv_heads, head_dim = pages.kv_heads, pages.head_dim
    heads = qkv.double().view(qkv.shape[0], num_heads + 2 * kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if qk_norm is not None:
        q = _normalise(q, qk_norm[0], qk_norm[2])
        k = _normalise(k, qk_norm[1], qk_norm[2])
    if cos_sin is not None:
        turn = cos_sin[positions.clamp(min=0).long()].double()[:, None]
        q, k = _rotate(q, turn), _rotate(k, turn)
    real = positions >= 0
    at = positions[real].long()
    blocks = block_tables[slots[real].long(), at // PAGE].long()
    if rounded is not None:
        if spreads_keys(rounded):
            q, k = spread(q), spread(k)
        layout = _layout(pages, rounded)
        for number, new in enumerate((k[real], v[real])):
            words, scales = encode(new, rounded)
            layout.elements(kv)[blocks, layer, :, number, at % PAGE] = words
            layout.factors(kv)[blocks, layer, :, at % PAGE, number] = scales
        return q, k
    kv[blocks, layer, 0, :, at % PAGE] = k[real].to(kv.dtype)
    kv[blocks, layer, 1, :, at % PAGE] = v[real].to(kv.dtype)
    return q, k


def attend(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    scale: float,
    slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    rounded: str | None = None,
) -> Tensor:
    """Each row of ``q [T, Hq, D]`` attends to positions 0 to its own (or the last ``window`` of them) of its slot.

    Returns float64 ``[T, Hq * D]``; rows with position -1 are zero.
    """
    pages = pages_of(kv, rounded)
    kv_heads = pages.kv_heads
    rows, heads, head_dim = q.shape
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64, device=q.device)
    for slot in torch.unique(slots[positions >= 0]).tolist():
        mine = torch.nonzero((slots == slot) & (positions >= 0)).flatten()
        length = int(positions[mine].max()) + 1
        keys, values = _context(kv, pages, layer, block_tables[slot], length, rounded)
        # Bounds the score matrix, which is heads x rows x length in float64.
        for part in torch.split(mine, 256):
            at = positions[part].long()
            grouped = q[part].double().view(len(part), kv_heads, -1, head_dim)
            scores = torch.einsum("thgd,lhd->thgl", grouped, keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(length, device=q.device)[None, :] - at[:, None]
            if slopes is not None:
                scores += slopes.double().view(1, kv_heads, -1, 1) * distance[:, None, None, :]
            hidden = distance > 0
            if window is not None:
                hidden |= distance <= -window
            scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
            mixed = torch.einsum("thgl,lhd->thgd", scores.softmax(-1), values)
            out[part] = mixed.reshape(len(part), heads, head_dim)
    return out.view(rows, heads * head_dim)


def tile_rows(tiles: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Slots and positions ``[rows]`` int32 that ``tiles [NT, 5]`` name; -1 for rows in none of them."""
    slots = torch.zeros(rows, dtype=torch.int32, device=tiles.device)
    positions = torch.full((rows,), -1, dtype=torch.int32, device=tiles.device)
    for slot, row, position, count, _ in tiles.tolist():
        slots[row : row + count] = slot
        positions[row : row + count] = torch.arange(position, position + count, device=tiles.device)
    return slots, positions


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """``x [T, heads, D]`` by ``turn [T, 1, D / 2, 2]`` (cosine, sine)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turn[..., 0], turn[..., 1]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _layout(pages: Pages, rounded: str) -> TileLayout:
    form = KVFormat(dtype=rounded, layers=pages.layers, kv_heads=pages.kv_heads, head_dim=pages.head_dim)
    return TileLayout(form)


def _context(
    kv: Tensor, pages: Pages, layer: int, table: Tensor, length: int, rounded: str | None
) -> tuple[Tensor, Tensor]:
    """K and V float64 ``[length, Hkv, D]`` of one request's first ``length`` positions."""
    held = kv[table[: -(-length // PAGE)].long(), layer]
    if rounded is not None:
        layout = _layout(pages, rounded)
        # [blocks, Hkv, 2, 16, D], as the others lie [blocks, 2, Hkv, 16, D].
        held = decode(layout.elements(held), layout.factors(held).transpose(-3, -2), rounded).transpose(1, 2)
    flat = held.double().permute(1, 0, 3, 2, 4).reshape(2, -1, pages.kv_heads, pages.head_dim)[:, :length]
    return flat[0], flat[1]
