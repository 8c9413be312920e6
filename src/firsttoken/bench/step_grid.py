"""Which steps ``bench steps`` measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from firsttoken.core.step_sizes import GRAPH_SIZES, next_size

DECODE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
PREFILL_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREFILL_STARTS = (0, 512, 2048, 4096, 8192)
MIXED_ROWS = (1, 4, 8, 16, 32, 64)
MIXED_CONTEXTS = (512, 2048, 8192)
# Token rows of a mixed step, those of its decode rows as GPUs pad them included: the sizes that an engine runs.
MIXED_TOTALS = (128, 256, 512, 640, 768, 1024, 2048)
# A mixed step's prompt chunk is in the middle of a prompt as often as at its beginning.
MIXED_STARTS = (0, 1024)


@dataclass(frozen=True)
class Cell:
    """A step: ``decode_rows`` rows decode one token each with ``context`` tokens before it, and ``prefill_tokens``
    prompt tokens of one further row are computed from position ``prefill_start`` on."""

    decode_rows: int = 0
    context: int = 0
    prefill_tokens: int = 0
    prefill_start: int = 0

    @property
    def kind(self) -> str:
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"

    @property
    def rows(self) -> int:
        return self.decode_rows + bool(self.prefill_tokens)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decode_rows + self.prefill_tokens

    @property
    def prefill_end(self) -> int:
        return self.prefill_start + self.prefill_tokens


@dataclass(frozen=True)
class Limits:
    """What may be measured: lengths in tokens (``length`` of one row, ``step`` of a step), ``blocks`` of
    ``block_tokens``; the decode rows grow by ``growth`` tokens while a cell is measured."""

    rows: int
    length: int
    step: int
    blocks: int
    block_tokens: int
    growth: int

    def blocks_of(self, cell: Cell) -> int:
        """KV blocks that the cell's rows need."""
        decode = cell.decode_rows * -(-(cell.context + self.growth) // self.block_tokens)
        # One token more than computed: the sampled one has its place too.
        prefill = -(-(cell.prefill_end + 1) // self.block_tokens) if cell.prefill_tokens else 0
        return decode + prefill

    def allow(self, cell: Cell) -> bool:
        length = max(cell.context + self.growth if cell.decode_rows else 0, cell.prefill_end + 1)
        return (
            cell.rows <= self.rows
            and length <= self.length
            and cell.tokens <= self.step
            and self.blocks_of(cell) <= self.blocks
        )


def grid(limits: Limits) -> list[Cell]:
    """All cells that ``limits`` allow, decode steps first; without limits there are more than 300."""
    return [cell for cell in _all() if limits.allow(cell)]


def _all() -> Iterator[Cell]:
    for rows, context in product(DECODE_ROWS, CONTEXTS):
        yield Cell(decode_rows=rows, context=context)
    for tokens, start in product(PREFILL_TOKENS, PREFILL_STARTS):
        yield Cell(prefill_tokens=tokens, prefill_start=start)
    for rows, context, total, start in product(MIXED_ROWS, MIXED_CONTEXTS, MIXED_TOTALS, MIXED_STARTS):
        yield Cell(rows, context, total - next_size(GRAPH_SIZES.mixed_rows, rows), start)
