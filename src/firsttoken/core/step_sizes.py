"""The sizes that a device pads its steps to: what a step costs depends on those, not on what was asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple


class StepSizes(NamedTuple):
    """Rising sizes, in token rows: of a step's decode rows when there are no chunks, of its chunks' tokens when there
    are no decode rows, and where both are, of its decode rows and of all together. What is larger than the last of
    them is not padded, so empty ones stand for a device that never pads."""

    decode: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    mixed_rows: tuple[int, ...] = ()
    mixed_totals: tuple[int, ...] = ()

    def padded(self, decode_rows: int, prefill_tokens: int) -> int:
        """All token rows of the step as the device computes it."""
        if not prefill_tokens:
            return next_size(self.decode, decode_rows)
        if not decode_rows:
            return next_size(self.chunks, prefill_tokens)
        return next_size(self.mixed_totals, next_size(self.mixed_rows, decode_rows) + prefill_tokens)


def next_size(sizes: tuple[int, ...], least: int) -> int:
    """The first of ``sizes`` that is ``least`` or more; ``least`` itself when none is."""
    place = bisect_left(sizes, least)
    return sizes[place] if place < len(sizes) else least


def graph_sizes(rows: int, tokens: int) -> StepSizes:
    """Sizes of steps that are captured as graphs, for at most ``rows`` decode rows and ``tokens`` tokens of chunks.

    Each size has a graph of its own before its steps cost the host one launch instead of hundreds, so they are few.
    All are sizes at which products run well (`benchmarks/gpu/products.py`: 448 token rows take a third longer than 512,
    and 64 more than 512 or 1,024 a fifth).
    """
    # Up to 64 rows a step is bound by reading weights and by attention, where a padded row costs next to nothing;
    # above, cuBLAS works in tiles of 16 rows or more.
    decode = [1, 2, 4, 8, 16, *range(32, 129, 16), *range(160, 257, 32), *range(320, 1025, 64)]
    decode += range(1280, rows + 256, 256)
    # At most 20 % of a step of chunks alone above 512 is padding.
    chunks = [16, 32, 48, *range(64, 385, 64), 512, *range(640, 2049, 128), *range(2304, 4097, 256)]
    chunks += range(4608, tokens + 512, 512)
    # Beside chunks a padded row takes the place of a token of a prompt. The two sizes come in any combination.
    mixed_rows = [4, 16, 32, 48, 64, 96, *(128 << i for i in range(11))]
    totals = [64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048]
    most_rows = _up_to(mixed_rows, rows)
    totals += range(3072, most_rows[-1] + tokens + 1024, 1024)
    return StepSizes(_up_to(decode, rows), _up_to(chunks, tokens), most_rows, _up_to(totals, most_rows[-1] + tokens))


def _up_to(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """``sizes`` below ``most``, and ``most``."""
    return (*(size for size in sizes if size < most), max(most, 1))


# For any step that a GPU may be given.
GRAPH_SIZES = graph_sizes(8192, 16384)
