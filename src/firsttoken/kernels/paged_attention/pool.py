"""The KV pool: one tensor for all blocks, and the flat views that gather and scatter rows of it."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.layout import choose_layout, device_capability

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVPool:
    """Storage ``[num_blocks, layers, 2 (K, V), kv_heads, block_tokens, head_dim]``, contiguous: a block is one slab.

    Starts as it comes from the system, so that memory is only taken as blocks come into use. Attention reads whole
    blocks and masks the slots past a row's length, which is only safe while those hold finite numbers:
    `AttentionContext` zeroes each block that it begins. Raises ValueError for a format it cannot hold.
    """

    __slots__ = ("format", "num_blocks", "storage", "tile_rows", "token_rows")

    def __init__(self, kv_format: KVFormat, num_blocks: int, device: str = "cpu") -> None:
        if kv_format.dtype not in _DTYPES or kv_format.scale_bytes:
            raise ValueError(
                f"KV format {kv_format.key!r} is not supported by this pool: choose one of {', '.join(_DTYPES)}"
            )
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, got {num_blocks}")
        f = kv_format
        self.format = f
        self.num_blocks = num_blocks
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

    @property
    def tiles_per_block(self) -> int:
        return self.format.layers * 2 * self.format.kv_heads

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes
