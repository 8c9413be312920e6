"""Shape profiles: the few padded shapes that steps are run at, so that each has its graph and its kernels' configs.

A step's rows are laid out as ``[decode rows, padded | tokens of chunks, padded]``. Padding rows have position -1:
kernels write nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from firsttoken.core.step_sizes import graph_sizes

# Rows that the small-M projections take; above, products go to cuBLAS.
SMALL_ROWS = 64
# Beside decode rows there is room for so many chunks at least: an empty tile of attention costs a microsecond a layer
# at most, a shape more costs a graph, and a load of short prompts would see twice as many shapes.
CHUNKS_BESIDE = 16


@dataclass(frozen=True, order=True)
class StepShape:
    """Padded sizes of a step: token rows in all, leading decode rows, attention tiles of chunks, sampled rows."""

    tokens: int
    decode_rows: int
    tiles: int
    samples: int

    @property
    def decode_only(self) -> bool:
        return self.tiles == 0

    @cached_property
    def key(self) -> str:
        """Its name in the records of steps: decode rows and tokens of chunks."""
        chunks = self.tokens - self.decode_rows
        return (f"d{self.decode_rows}" if self.decode_rows else "") + (f"p{chunks}" if chunks else "")


class ShapeTable:
    """Finds the padded shape of a step. ``tile_rows``: query rows of one attention tile."""

    def __init__(self, max_num_seqs: int, max_step_tokens: int, tile_rows: int) -> None:
        self.sizes = graph_sizes(max_num_seqs, max_step_tokens)
        self.tile_rows = tile_rows
        self.max_num_seqs = max_num_seqs
        self._decode_of = _lookup(self.sizes.decode)
        self._tokens_of = _lookup(self.sizes.chunks)
        # Of decode rows, and of chunks, each of which may leave a tile partly empty and may sample.
        self._rows_of = _lookup(self.sizes.mixed_rows)
        few = min(CHUNKS_BESIDE, self.sizes.mixed_rows[-1])
        self._chunks_beside = _lookup([size for size in self.sizes.mixed_rows if size >= few])
        self._total_of = _lookup(self.sizes.mixed_totals)

    def shape(self, decode_rows: int, chunks: Sequence[int], sampling_chunks: int) -> StepShape:
        """For ``decode_rows`` rows of one token and chunks of the given lengths, the last ``sampling_chunks`` counted
        as rows that sample."""
        if not chunks:
            rows = self._decode_of[decode_rows]
            return StepShape(rows, rows, 0, rows)
        rows = self._rows_of[decode_rows]
        count = (self._chunks_beside if rows else self._rows_of)[len(chunks)]
        total = self._total_of[rows + sum(chunks)] if rows else self._tokens_of[sum(chunks)]
        tiles = -(-(total - rows) // self.tile_rows) + count
        # Beside decode rows the head is computed anyway, and a few rows more of it cost next to nothing.
        return StepShape(total, rows, tiles, rows + count if rows or sampling_chunks else 0)

    def largest(self) -> StepShape:
        """No step's shape needs more words of input."""
        rows, count, total = self.sizes.decode[-1], self.sizes.mixed_rows[-1], self.sizes.mixed_totals[-1]
        return StepShape(total, rows, -(-total // self.tile_rows) + count, rows + count)

    def prompt_shapes(self, most: int) -> list[StepShape]:
        """Shapes of steps that compute one prompt of up to ``most`` tokens and nothing else, the smallest first."""
        return [self.shape(0, [size], 1) for size in self.sizes.chunks if size <= most]

    def mixed_shapes(self, most: int) -> list[StepShape]:
        """Shapes of steps of up to ``most`` token rows that have decode rows and a few chunks, the smallest first."""
        totals = [total for total in self.sizes.mixed_totals if total <= most]
        return [self.shape(few, [total - few], 1) for total in totals for few in self.sizes.mixed_rows if few < total]

    def decode_shapes(self) -> list[StepShape]:
        """All shapes of decode-only steps, the smallest first."""
        return [StepShape(size, size, 0, size) for size in self.sizes.decode]


def _lookup(sizes: Sequence[int]) -> list[int]:
    """``lookup[size]`` is the padded size."""
    table = [0]
    for size in sizes:
        table.extend([size] * (size + 1 - len(table)))
    return table
