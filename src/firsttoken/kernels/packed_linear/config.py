"""Choices of the packed linear kernels: how a product is divided over warps and programs. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from firsttoken.core.errors import ConfigError

TILE = 16
# Columns of a chunk, which a warp loads at once.
CHUNK_COLUMNS = {"int4": 256, "fp8": 128}
MAX_ROWS = 64
# Rows up to which these kernels are faster than products of rounded rows: a step of 8 rows of an 8B in int4 takes 2.46
# and 2.78 ms, of 16 rows 3.84 and 2.82.
FEW_ROWS = {"int4": 8, "fp8": 8}
BlockM = Literal[8, 16, 32, 64]
ColumnWarps = Literal[1, 2, 4, 8, 16]
_WIDTHS: tuple[ColumnWarps, ...] = (1, 2, 4, 8)


class PackedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``row_warps`` warps with ``warp_tiles`` tiles of 16 rows of W each, times ``column_warps`` that divide the
    columns; up to ``block_m`` rows of x. Loads run ``ahead`` chunks before the products."""

    row_warps: Literal[1, 2, 4, 8]
    column_warps: ColumnWarps
    block_m: BlockM = 8
    ahead: Literal[1, 2] = 1
    warp_tiles: Literal[1, 2] = 1

    @property
    def block_n(self) -> int:
        return TILE * self.row_warps * self.warp_tiles

    @property
    def warps(self) -> int:
        return self.row_warps * self.column_warps

    def tiles(self, n: int) -> int:
        """Programs that divide the ``n`` columns of the result."""
        return -(-n // self.block_n)

    def check(self, chunks: int) -> None:
        """Raise `ConfigError` where the kernel cannot divide a row of ``chunks`` like this."""
        parts = self.column_warps
        if self.warps > 16:
            raise ConfigError(f"{self}: {self.warps} warps a program, 16 are the most")
        if parts > chunks or self.ahead > -(-chunks // parts):
            raise ConfigError(f"{self} divides a row of {chunks} chunks too finely")


def int4_group(columns: int) -> int:
    """The columns that share a scale where ``columns`` may: 128 or the most that divide them, 0 where none do."""
    return next((size for size in (128, 64, 32) if columns % size == 0), 0)


def default_config(n: int, k: int, rows: int, format: str) -> PackedConfig:
    """A good division where none was measured: some 1,500 warps or more, each with two chunks at least."""
    tiles, chunks = -(-n // TILE), -(-k // CHUNK_COLUMNS[format])
    block_m: BlockM = 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64
    if block_m > 16 and tiles >= 1000:
        return PackedConfig(4, 1, block_m, warp_tiles=2)
    wanted = 8 if tiles < 300 else 4 if tiles < 1500 or block_m == 8 else 1
    if tiles > 4000:
        wanted = 2
    column_warps = max(size for size in _WIDTHS if size <= wanted and (size == 1 or 2 * size <= chunks))
    ahead: Literal[1, 2] = 2 if block_m <= 16 and -(-chunks // column_warps) >= 2 else 1
    return PackedConfig(1, column_warps, block_m, ahead=ahead)


class RoundedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How FP8 rows are multiplied: programs of ``block_n`` columns of the result and ``block_m`` rows, ``split`` of
    which share the columns of W. FP8 weights come ``block_k`` columns at a time, int4 a group. ``format``: what W is
    in the product; int4 weights may be written as FP8 first."""

    format: Literal["int4", "fp8"]
    block_n: Literal[32, 64, 128, 256]
    block_m: Literal[16, 32, 64, 128]
    warps: Literal[1, 2, 4, 8, 16]
    stages: Literal[2, 3, 4, 6]
    split: Literal[1, 2, 4, 8] = 1
    block_k: Literal[64, 128] = 128

    def tiles(self, n: int) -> int:
        return -(-n // self.block_n)

    def workspace_floats(self, n: int, rows: int) -> int:
        """float32 values that the parts of a product leave for each other; 0 without a split."""
        blocks = -(-rows // self.block_m)
        return self.tiles(n) * blocks * self.split * self.block_n * self.block_m if self.split > 1 else 0

    def check(self, k: int) -> None:
        """Raise `ConfigError` where parts of K would be empty."""
        steps = -(-k // 128)
        if (self.split - 1) * -(-steps // self.split) >= steps:
            raise ConfigError(f"{self} leaves parts without any of the {steps} blocks of K")


# Rows up to which int4 is multiplied from its nibbles; for more, to write it as FP8 first costs less. One layer of an
# 8B: 192 us for 215 at 256 rows, 430 for 286 at 512.
MIXED_ROWS = 256
_MULTIPROCESSORS = 132
# A product is divided among no more programs than these where its parts of K meet; so much they leave each other.
_MOST_SHARING = 2 * _MULTIPROCESSORS + 24
SHARED_FLOATS, SHARED_TILES = _MOST_SHARING * 128 * 64, _MOST_SHARING // 2
_Split = Literal[1, 2, 4, 8]
_SPLITS: tuple[_Split, ...] = (8, 4, 2, 1)


def rounded_config(n: int, k: int, rows: int, format: str) -> RoundedConfig:
    """The division for a product of ``rows`` rows with weights ``[n, k]``, from sweeps on an H200."""
    if format == "int4" and rows <= MIXED_ROWS:
        block_m = _block_m(rows)
        programs = -(-n // 128) * -(-rows // block_m)
        return RoundedConfig("int4", 128, block_m, 4, 4, _split(programs, k, least=8, most=8))
    tall, blocks = -(-n // 128), -(-rows // 128)
    if rows <= 64 or tall * blocks < 100:
        block_m = _block_m(rows)
        programs = -(-n // 64) * -(-rows // block_m)
        stages: Literal[4, 6] = 6 if rows <= 64 else 4
        return RoundedConfig("fp8", 64, block_m, 4, stages, _split(programs, k, least=8, most=4))
    if tall * blocks >= 2000:
        return RoundedConfig("fp8", 256, 128, 16, 4)
    return RoundedConfig("fp8", 128, 128, 8, 3 if tall * blocks > _MULTIPROCESSORS else 4)


def _block_m(rows: int) -> Literal[16, 32, 64]:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _split(programs: int, k: int, least: int, most: int) -> _Split:
    """Parts that make some two programs a multiprocessor, each with ``least`` blocks of K or more."""
    steps = -(-k // 128)
    for split in _SPLITS:
        enough = programs * split <= _MOST_SHARING and -(-steps // split) >= least
        if split == 1 or (split <= most and enough and (split - 1) * -(-steps // split) < steps):
            return split
    return 1
