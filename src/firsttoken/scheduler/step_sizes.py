"""The sizes that a device pads its steps to: what a step costs depends on those, not on what was asked for."""

from __future__ import annotations

from bisect import bisect_left
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


# As `executor.graphs.profiles` has them, which this room may not import; a test compares the two.
GRAPH_SIZES = StepSizes(
    decode=(1, 2, 4, 8, 16, *range(32, 129, 16), *range(160, 257, 32), *range(320, 1025, 64), *range(1280, 8193, 256)),
    chunks=(
        16,
        32,
        48,
        *range(64, 385, 64),
        512,
        *range(640, 2049, 128),
        *range(2304, 4097, 256),
        *range(4608, 16385, 512),
    ),
    mixed_rows=(4, *(16 << doubling for doubling in range(10))),
    mixed_totals=(64, 128, 256, 384, 512, 768, 1024, 1536, 2048, *range(3072, 24577, 1024)),
)
