"""KV cache layouts: K and V of one layer, for all rows of a step, gathered head by head from scattered blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from firsttoken.bench.layouts.case import Case, Measured, Setting
from firsttoken.bench.layouts.timing import Operation

BLOCK_TOKENS = 16
LAYERS = 8  # an operation reads one of them; together they are more than a cache holds

# The order of the storage's dimensions: block, layer, K or V, head, token (dim is innermost).
ORDERS = {
    "slab_heads": "blkht",  # a block is one slab of all layers, a head's tokens lie together
    "slab_tokens": "blkth",  # a block is one slab, a token's heads lie together
    "layer_heads": "lkbht",  # each layer has a pool of its own
    "layer_tokens": "lkbth",
    "layer_token_rows": "lkbt_h",  # as layer_tokens, but a token is read at once with all its heads
}


@dataclass(frozen=True)
class Gather:
    """One layout at one shape."""

    order: str
    kv_heads: int
    head_dim: int

    def __call__(self, setting: Setting) -> Case:
        per_block = 2 * self.kv_heads * BLOCK_TOKENS * self.head_dim * setting.element_bytes
        blocks = max(1, setting.nbytes // (per_block * LAYERS))
        storage = setting.random(blocks * LAYERS * per_block // setting.element_bytes)
        table = torch.randperm(blocks, device=setting.device)
        operations = [self._operation(storage, layer, table) for layer in range(LAYERS)]
        return Case(operations, 2 * blocks * per_block)  # read and written

    def _operation(self, storage: torch.Tensor, layer: int, table: torch.Tensor) -> Operation:
        run = self.head_dim  # elements in one piece
        letters = self.order
        if "_" in letters:  # the dimensions behind the mark are read together
            run *= self.kv_heads
            letters = letters.partition("_")[0]
        elif letters.endswith("t"):
            run *= BLOCK_TOKENS
            letters = letters[:-1]
        rows = storage.view(-1, run)
        index = self._index(letters, layer, table)
        out = torch.empty((len(index), run), device=storage.device, dtype=storage.dtype)
        return lambda: torch.index_select(rows, 0, index, out=out)

    def _index(self, letters: str, layer: int, table: torch.Tensor) -> torch.Tensor:
        """Row numbers of all pieces of this layer, in the order in which a program for each row and head reads."""
        sizes = {"b": len(table), "l": LAYERS, "k": 2, "h": self.kv_heads, "t": BLOCK_TOKENS}
        strides, stride = {}, 1
        for letter in reversed(letters):
            strides[letter] = stride
            stride *= sizes[letter]
        device = table.device
        parts = {"b": table}
        for letter in "kht":
            parts[letter] = torch.arange(sizes[letter] if letter in letters else 1, device=device)
        index = torch.full((), layer * strides["l"], device=device)
        # Heads before blocks: a program reads one head of many blocks.
        for letter in "khbt":
            index = index.unsqueeze(-1) + parts[letter] * strides.get(letter, 0)
        return index.reshape(-1)


def measured() -> Iterator[Measured]:
    """Every layout at the shapes of the models that are benchmarked most."""
    for (kv_heads, head_dim), (layout, order) in product(((8, 128), (8, 64), (3, 64), (2, 80)), ORDERS.items()):
        yield Measured(
            f"kv {kv_heads}x{head_dim}",
            layout,
            Gather(order, kv_heads, head_dim),
            asked=("kv", (LAYERS, kv_heads, BLOCK_TOKENS), head_dim),
        )
