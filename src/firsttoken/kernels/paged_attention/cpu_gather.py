"""Where the CPU's attention reads and writes the pool: rows of its flat views, in any format.

All indices are for layer 0; the pool's per-layer views make them valid for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.kernels.paged_attention.params import Segment
from firsttoken.kernels.paged_attention.pool import KVPool
from firsttoken.kernels.paged_attention.rounded import TileLayout, decode, encode, spread, spreads_keys


def compute_type(pool: KVPool, activations: torch.dtype) -> torch.dtype:
    """The type in which much of K and V is multiplied: what is rounded is brought to that of the activations."""
    return activations if pool.format.rounded else pool.storage.dtype


class Gather:
    """K and V of the same blocks in any layer, contiguous and in the type that they are multiplied in.

    ``tables`` int64 ``[rows, blocks]``. One buffer serves all layers: a fresh one each would cost its page faults again
    and again.
    """

    __slots__ = ("_dtype", "_gathered", "_index", "_layout", "_pool", "_shape", "_wide")

    def __init__(self, pool: KVPool, tables: Tensor, dtype: torch.dtype) -> None:
        f = pool.format
        self._pool, self._dtype = pool, dtype
        self._shape = (2, len(tables) * f.kv_heads, -1, f.head_dim)
        # [2, rows, kv_heads, blocks], so that what is gathered needs no other order; a rounded tile has K and V both.
        parts = 1 if f.rounded else 2
        heads = torch.arange(parts * f.kv_heads).view(parts, 1, f.kv_heads, 1)
        self._index = (tables[None, :, None, :] * pool.tiles_per_block + heads).flatten()
        self._gathered = torch.empty(len(self._index), pool.tile_rows[0].shape[1], dtype=pool.storage.dtype)
        if f.rounded:
            self._layout = TileLayout(f)
            fields = f.head_dim // self._layout.words
            self._wide = torch.empty(2, len(self._index), f.block_tokens, fields, self._layout.words, dtype=dtype)

    def read(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """K and V ``[rows * kv_heads, context, head_dim]`` of a layer's ``tiles``, until the next call."""
        torch.index_select(tiles, 0, self._index, out=self._gathered)
        if not self._pool.format.rounded:
            keys, values = self._gathered.to(self._dtype).view(self._shape).unbind(0)
            return keys, values
        words = self._layout.elements(self._gathered).transpose(0, 1)
        scales = self._layout.factors(self._gathered).permute(2, 0, 1, 3)
        wide = decode(words, scales, self._pool.format.dtype, self._wide)
        keys, values = wide.view(self._shape).unbind(0)
        return keys, values


def write_rows(pool: KVPool, segments: Sequence[Segment]) -> Tensor:
    """Index into ``pool.token_rows`` for what `write_tokens` writes, flattened: for each (token, K or V, KV head), of a
    rounded format for each (token, KV head, word of K, V and their scales)."""
    f = pool.format
    blocks, offsets = [], []
    for segment in segments:
        positions = torch.arange(segment.start, segment.end)
        blocks.append(segment.block_table[positions // f.block_tokens])
        offsets.append(positions % f.block_tokens)
    tiles = torch.cat(blocks)[:, None] * pool.tiles_per_block + torch.arange(pool.tiles_per_layer)
    offset = torch.cat(offsets)[:, None]
    if not f.rounded:
        return (tiles * f.block_tokens + offset).flatten()
    layout = TileLayout(f)
    vector, scales = torch.arange(layout.words), torch.arange(layout.scales)
    keys = offset * layout.words + vector
    place = torch.cat(
        (
            keys,
            layout.tokens * layout.words + keys,
            2 * layout.tokens * layout.words + offset * layout.scales + scales,
        ),
        1,
    )
    return (tiles[:, :, None] * layout.size + place[:, None, :]).flatten()


def write_tokens(pool: KVPool, layer: int, rows: Tensor, new: Tensor) -> None:
    """Put ``new [T, 2 Hkv, D]`` float32, K heads and then V's, where `write_rows` says."""
    f, target = pool.format, pool.token_rows[layer]
    if not f.rounded:
        target.index_copy_(0, rows, new.to(pool.storage.dtype).reshape(-1, f.head_dim))
        return
    words, scales = encode(new.reshape(-1, 2, f.kv_heads, f.head_dim).transpose(1, 2), f.dtype)
    target.scatter_(0, rows, torch.cat((words.flatten(2), scales.view(torch.int16).flatten(2)), -1).flatten())


def spread_keys(pool: KVPool, heads: Tensor, num_heads: int) -> Tensor:
    """q and K of ``heads [T, Hq + 2 Hkv, D]`` as they are multiplied (`rounded.spread`); ``num_heads`` of q."""
    if not spreads_keys(pool.format.dtype):
        return heads
    keyed = num_heads + pool.format.kv_heads
    return torch.cat((spread(heads[:, :keyed]), heads[:, keyed:]), 1)
