"""How K and V of one token are stored: the one place that knows how many bytes a KV block takes."""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 16

_ELEMENT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8": 8, "int4": 4}
# Beside each vector of a head: eight bits have a bfloat16 scale, int4 a scale and a least value.
_SCALE_BYTES = {"int8": 2, "fp8": 2, "int4": 4}
# Words of 16 bits hold elements from as many equal parts of a head as they have room for.
_HEAD_MULTIPLE = 8

ROUNDED = tuple(_SCALE_BYTES)
"""The dtypes whose elements are fewer than 16 bits and have scales beside them."""


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and element type of the KV cache of one model.

    A block holds ``block_tokens`` tokens of *all* layers in one contiguous slab, laid out
    ``[layers, 2 (K, V), kv_heads, block_tokens, head_dim]``. A `ROUNDED` dtype keeps what belongs to a head together:
    ``[layers, kv_heads, tile]``, where a tile is K of all tokens, V of all tokens, and for each token the scales of
    its K and of its V. KV memory is linear in length. Raises ValueError for a dtype or a head it cannot be.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.dtype not in _ELEMENT_BITS:
            raise ValueError(f"unknown KV dtype {self.dtype!r}: known are {', '.join(_ELEMENT_BITS)}")
        if self.rounded and self.head_dim % _HEAD_MULTIPLE:
            raise ValueError(
                f"KV dtype {self.dtype!r} needs heads of a multiple of {_HEAD_MULTIPLE} elements, got {self.head_dim}"
            )

    @property
    def rounded(self) -> bool:
        return self.dtype in _SCALE_BYTES

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales that each head vector has beside its elements."""
        return _SCALE_BYTES.get(self.dtype, 0)

    @property
    def vector_bytes(self) -> int:
        """Bytes of a head vector's elements."""
        return self.head_dim * _ELEMENT_BITS[self.dtype] // 8

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, scales included."""
        vectors = 2 * self.layers * self.kv_heads
        return vectors * (self.vector_bytes + self.scale_bytes)

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
