"""Paged attention spelled out in float64, one query token at a time. Slow on purpose: the other forms answer to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.kernels.paged_attention.params import AttentionParams, AttentionSpec, Segment
from firsttoken.kernels.paged_attention.pool import KVPool
from firsttoken.kernels.paged_attention.rounded import TileLayout, decode, encode, spread, spreads_keys
from firsttoken.kernels.rms_norm.reference import rms_norm
from firsttoken.kernels.rope.reference import apply_rope


def attend(pool: KVPool, segments: Sequence[Segment], layer: AttentionParams, qkv: Tensor) -> Tensor:
    """The same contract as `AttentionContext.attend`: writes K and V into ``pool``, gives float64 ``[T, Hq * D]``."""
    spec = layer.spec
    hq, hk, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    heads = qkv.view(qkv.shape[0], hq + 2 * hk, d).double()
    q, k, v = heads[:, :hq], heads[:, hq : hq + hk], heads[:, hq + hk :]
    if layer.qk_norm is not None:
        q = rms_norm(q, layer.qk_norm.q_weight, layer.qk_norm.eps)
        k = rms_norm(k, layer.qk_norm.k_weight, layer.qk_norm.eps)
    positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
    if spec.rope is not None:
        q, k = apply_rope(q, positions, spec.rope), apply_rope(k, positions, spec.rope)
    if spreads_keys(pool.format.dtype):
        q, k = spread(q), spread(k)
    out = torch.empty(qkv.shape[0], hq * d, dtype=torch.float64)
    row = 0
    for segment in segments:
        for position in range(segment.start, segment.end):
            _write(pool, segment, layer.layer, position, k[row], v[row])
            first = 0 if layer.window is None else max(0, position + 1 - layer.window)
            keys, values = _context(pool, segment, layer.layer, first, position + 1)
            out[row] = _attend_one(q[row], keys, values, spec).flatten()
            row += 1
    return out


def _slot(pool: KVPool, segment: Segment, position: int) -> tuple[int, int]:
    block_tokens = pool.format.block_tokens
    return int(segment.block_table[position // block_tokens]), position % block_tokens


def _write(pool: KVPool, segment: Segment, layer: int, position: int, k: Tensor, v: Tensor) -> None:
    block, offset = _slot(pool, segment, position)
    if pool.format.rounded:
        layout, tiles = TileLayout(pool.format), pool.storage[block, layer]
        words, scales = encode(torch.stack((k, v), 1), pool.format.dtype)
        layout.elements(tiles)[:, :, offset] = words
        layout.factors(tiles)[:, offset] = scales
        return
    pool.storage[block, layer, 0, :, offset] = k.to(pool.storage.dtype)
    pool.storage[block, layer, 1, :, offset] = v.to(pool.storage.dtype)


def _context(pool: KVPool, segment: Segment, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V ``[end - first, kv_heads, head_dim]`` of positions ``first`` to ``end - 1``."""
    slots = [_slot(pool, segment, position) for position in range(first, end)]
    if pool.format.rounded:
        layout = TileLayout(pool.format)
        tiles = torch.stack([pool.storage[block, layer] for block, _ in slots])
        rows, offsets = torch.arange(len(slots)), torch.tensor([offset for _, offset in slots])
        words, scales = layout.elements(tiles)[rows, :, :, offsets], layout.factors(tiles)[rows, :, offsets]
        both = decode(words, scales, pool.format.dtype).double()
        return both[:, :, 0], both[:, :, 1]
    keys = torch.stack([pool.storage[block, layer, 0, :, offset] for block, offset in slots])
    values = torch.stack([pool.storage[block, layer, 1, :, offset] for block, offset in slots])
    return keys.double(), values.double()


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """Softmax attention of the last of ``length`` tokens: ``q [Hq, D]`` over ``[length, Hkv, D]`` -> ``[Hq, D]``."""
    distance = torch.arange(keys.shape[0] - 1, -1, -1, dtype=torch.float64)
    heads = []
    for head in range(q.shape[0]):
        scores = keys[:, head // spec.group] @ q[head] * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.alibi_slopes is not None:
            scores = scores - spec.alibi_slopes[head].double() * distance
        heads.append(torch.softmax(scores, dim=0) @ values[:, head // spec.group])
    return torch.stack(heads)
