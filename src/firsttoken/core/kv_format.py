"""How K and V of one token are stored: the one place that knows how many bytes a KV block takes."""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 16

_ELEMENT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3": 8, "int4": 4}


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and element type of the KV cache of one model.

    A block holds ``block_tokens`` tokens of *all* layers in one contiguous slab, laid out
    ``[layers, 2 (K, V), kv_heads, block_tokens, head_dim]``, followed by its scales where the format has them
    (``scale_bytes`` for each head vector). KV memory is linear in length.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _ELEMENT_BITS:
            raise ValueError(f"unknown KV dtype {self.dtype!r}: known are {', '.join(_ELEMENT_BITS)}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, scales included."""
        vectors = 2 * self.layers * self.kv_heads
        return vectors * (self.head_dim * _ELEMENT_BITS[self.dtype] // 8 + self.scale_bytes)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_tokens)

    @property
    def key(self) -> str:
        """A stable name: part of the identity at the root of the prefix chain."""
        return f"{self.dtype}/{self.layers}x{self.kv_heads}x{self.head_dim}/{self.block_tokens}/{self.scale_bytes}"
