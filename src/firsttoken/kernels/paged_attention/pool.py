"""The KV pool: one tensor for all blocks, and the flat views that gather and scatter rows of it."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.core.kv_format import ROUNDED, KVFormat
from firsttoken.kernels.layout import choose_layout, device_capability
from firsttoken.kernels.paged_attention.rounded import TileLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVPool:
    """Storage ``[num_blocks, layers, 2 (K, V), kv_heads, block_tokens, head_dim]``, contiguous: a block is one slab.
    Of a rounded format int16 ``[num_blocks, layers, kv_heads, tile]`` (`rounded.TileLayout`).

    Starts as it comes from the system, so that memory is only taken as blocks come into use. Attention reads whole
    blocks and masks the slots past a row's length, which is only safe while those hold finite numbers:
    `AttentionContext` zeroes each block that it begins. Raises ValueError for a format it cannot hold.
    """

    __slots__ = ("format", "num_blocks", "storage", "tile_rows", "token_rows")

    def __init__(self, kv_format: KVFormat, num_blocks: int, device: str = "cpu") -> None:
        if kv_format.dtype not in _DTYPES and not kv_format.rounded:
            raise ValueError(
                f"KV format {kv_format.key!r} is not supported by this pool: choose one of "
                f"{', '.join((*_DTYPES, *ROUNDED))}"
            )
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, got {num_blocks}")
        f = kv_format
        self.format = f
        self.num_blocks = num_blocks
        if f.rounded:
            self._of_tiles(num_blocks, device)
            return
        layout = choose_layout(
            "kv", (f.layers, f.kv_heads, f.block_tokens), f.head_dim, f.dtype, device_capability(device)
        )
        sizes = {
            "block": num_blocks,
            "layer": f.layers,
            "k_or_v": 2,
            "head": f.kv_heads,
            "token": f.block_tokens,
            "dim": f.head_dim,
        }
        shape = [sizes[dim] for dim in layout.dims]
        self.storage = torch.empty(shape, dtype=_DTYPES[f.dtype], device=device)
        # A tile is the [block_tokens, head_dim] of one (block, layer, K or V, head). Views that start at a layer's
        # first tile let one index, made for layer 0, serve every layer.
        tiles = self.storage.view(-1, f.block_tokens * f.head_dim)
        tokens = self.storage.view(-1, f.head_dim)
        first = [layer * 2 * f.kv_heads for layer in range(f.layers)]
        self.tile_rows: list[Tensor] = [tiles[tile:] for tile in first]
        self.token_rows: list[Tensor] = [tokens[tile * f.block_tokens :] for tile in first]

    def _of_tiles(self, num_blocks: int, device: str) -> None:
        """K and V of a head are one tile; what belongs to a token lies apart in it, so its "rows" are single words."""
        f, size = self.format, TileLayout(self.format).size
        self.storage = torch.empty((num_blocks, f.layers, f.kv_heads, size), dtype=torch.int16, device=device)
        tiles, words = self.storage.view(-1, size), self.storage.view(-1)
        self.tile_rows = [tiles[layer * f.kv_heads :] for layer in range(f.layers)]
        self.token_rows = [words[layer * f.kv_heads * size :] for layer in range(f.layers)]

    @property
    def tiles_per_block(self) -> int:
        return self.format.layers * self.tiles_per_layer

    @property
    def tiles_per_layer(self) -> int:
        return self.format.kv_heads * (1 if self.format.rounded else 2)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes
