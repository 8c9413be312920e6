"""Shape profiles: the few padded shapes that steps are run at, so that each has its graph and its kernels' configs.

A step's rows are laid out as ``[decode rows, padded | tokens of chunks, padded]``. Padding rows have position -1:
kernels write nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Rows that the small-M projections take; above, products go to cuBLAS.
SMALL_ROWS = 64


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


@dataclass(frozen=True)
class Profile:
    """A range of sizes, all run at the largest: ``low <= size <= high`` is padded to ``high``, which kernel configs are
    tuned for."""

    low: int
    high: int


def decode_profiles(max_rows: int) -> list[Profile]:
    """Profiles of decode-only steps up to ``max_rows`` rows.

    Up to 64 rows a step is bound by reading weights and by attention, where a padded row costs next to nothing; above,
    cuBLAS works in tiles of 16 rows or more.
    """
    highs = [1, 2, 4, 8, 16, *range(32, 129, 16), *range(160, 257, 32), *range(320, 1025, 64)]
    highs += range(1280, max_rows + 256, 256)
    return _up_to(highs, max_rows)


def token_profiles(max_tokens: int) -> list[Profile]:
    """Profiles of the tokens of a step that computes only chunks (prefill): at most 20 % of one above 512 is padding.

    No 448: cuBLAS (13.0, H200) takes a third longer for it than for 512.
    """
    highs = [16, 32, 48, *range(64, 385, 64), 512, *range(640, 2049, 128), *range(2304, 4097, 256)]
    highs += range(4608, max_tokens + 512, 512)
    return _up_to(highs, max_tokens)


def mixed_rows(max_rows: int) -> list[Profile]:
    """Profiles of the decode rows beside chunks. Few: the two sizes come in any combination, and each combination
    needs a graph of its own before its steps cost the host one launch instead of hundreds."""
    return _up_to([4, *(16 << i for i in range(14))], max_rows)


def mixed_totals(max_tokens: int) -> list[Profile]:
    """Profiles of all token rows of a step that has both, padded decode rows included: sizes at which products run
    best. 64 rows more than 512 or 1,024 take a fifth longer (`benchmarks/gpu/products.py`)."""
    highs = [64, 128, 256, 384, 512, 768, 1024, 1536, 2048]
    highs += range(3072, max_tokens + 1024, 1024)
    return _up_to(highs, max_tokens)


def _up_to(highs: Sequence[int], most: int) -> list[Profile]:
    profiles, low = [], 1
    for high in highs:
        high = min(high, max(most, low))
        profiles.append(Profile(low, high))
        low = high + 1
        if high >= most:
            break
    return profiles


class ShapeTable:
    """Finds the padded shape of a step. ``tile_rows``: query rows of one attention tile."""

    def __init__(self, max_num_seqs: int, max_step_tokens: int, tile_rows: int) -> None:
        self.decode = decode_profiles(max_num_seqs)
        self.chunks = token_profiles(max_step_tokens)
        self.mixed_rows = mixed_rows(max_num_seqs)
        self.tile_rows = tile_rows
        self.max_num_seqs = max_num_seqs
        self._decode_of = _lookup(self.decode)
        self._tokens_of = _lookup(self.chunks)
        self._rows_of = _lookup(self.mixed_rows)
        self._total_of = _lookup(mixed_totals(self.mixed_rows[-1].high + max_step_tokens))
        # Chunks, each of which may leave a tile partly empty and may sample.
        self._counts_of = _lookup(mixed_rows(max_num_seqs))

    def shape(self, decode_rows: int, chunks: Sequence[int], sampling_chunks: int) -> StepShape:
        """For ``decode_rows`` rows of one token and chunks of the given lengths, the last ``sampling_chunks`` counted
        as rows that sample."""
        if not chunks:
            rows = self._decode_of[decode_rows]
            return StepShape(rows, rows, 0, rows)
        rows, count = self._rows_of[decode_rows], self._counts_of[len(chunks)]
        total = self._total_of[rows + sum(chunks)] if rows else self._tokens_of[sum(chunks)]
        tiles = -(-(total - rows) // self.tile_rows) + count
        # Beside decode rows the head is computed anyway, and a few rows more of it cost next to nothing.
        return StepShape(total, rows, tiles, rows + count if rows or sampling_chunks else 0)

    def largest(self) -> StepShape:
        """No step's shape needs more words of input."""
        rows, count = max(self.decode[-1].high, self.mixed_rows[-1].high), self._counts_of[-1]
        total = self._total_of[-1]
        return StepShape(total, rows, -(-total // self.tile_rows) + count, rows + count)

    def prompt_shapes(self, most: int) -> list[StepShape]:
        """Shapes of steps that compute one prompt of up to ``most`` tokens and nothing else, the smallest first."""
        return [self.shape(0, [profile.high], 1) for profile in self.chunks if profile.high <= most]

    def mixed_shapes(self, most: int) -> list[StepShape]:
        """Shapes of steps of up to ``most`` token rows that have decode rows and a few chunks, the smallest first."""
        totals = dict.fromkeys(total for total in self._total_of[1:] if total <= most)
        rows = [profile.high for profile in self.mixed_rows]
        return [self.shape(few, [total - few], 1) for total in totals for few in rows if few < total]

    def decode_shapes(self) -> list[StepShape]:
        """All shapes of decode-only steps, the smallest first."""
        return [StepShape(profile.high, profile.high, 0, profile.high) for profile in self.decode]


def _lookup(profiles: Sequence[Profile]) -> list[int]:
    """``lookup[size]`` is the padded size."""
    table = [0]
    for profile in profiles:
        table.extend([profile.high] * (profile.high - profile.low + 1))
    return table
