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

    @property
    def sums(self) -> bool:
        """Whether it takes the sums of the groups of x."""
        return self.format == "int4"

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


class WideDivision(msgspec.Struct, frozen=True):
    """The first ``whole`` of ``tiles`` have a program each, the others ``split``, which divide their chunks of K."""

    tiles: int
    whole: int
    split: int

    @property
    def shared(self) -> int:
        return self.tiles - self.whole if self.split > 1 else 0

    @property
    def programs(self) -> int:
        return self.whole + (self.tiles - self.whole) * self.split


class WideConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """int4 weights that are scaled as they are unpacked, in tiles of ``block_n`` rows of W by ``block_m`` of x; chunks
    of 256 columns are copied ``stages - 1`` ahead."""

    block_m: Literal[16, 64, 128, 256]
    stages: Literal[2, 3, 4]
    block_n: Literal[16, 128] = 128
    warps: Literal[4, 8] = 8

    @property
    def sums(self) -> bool:
        """Whether it takes the sums of the groups of x."""
        return False

    def tiles(self, n: int, rows: int) -> int:
        return -(-n // self.block_n) * -(-rows // self.block_m)

    def divide(self, n: int, rows: int, k: int) -> WideDivision:
        """What is left after full waves of programs is split so that it takes least."""
        tiles, chunks = self.tiles(n, rows), self._chunks(k)
        whole = tiles // _MULTIPROCESSORS * _MULTIPROCESSORS
        rest = tiles - whole

        def fits(split: int) -> bool:
            span = -(-chunks // split)
            return split == 1 or (rest * split <= _MOST_SHARING and span >= 4 and (split - 1) * span < chunks)

        splits = (split for split in range(1, WIDE_MOST_SPLIT + 1) if rest and fits(split))
        divisions = [WideDivision(tiles, whole if split > 1 else tiles, split) for split in splits]
        return min(divisions, key=lambda one: self.estimate_us(one, k), default=WideDivision(tiles, tiles, 1))

    def estimate_us(self, division: WideDivision, k: int) -> float:
        """How long a product takes an H200, within a tenth of what `benchmarks.gpu.wide` measures from 10 us on."""
        a_chunk, a_tile, a_shared = _WIDE_US[self.block_m]
        chunks, split = self._chunks(k), division.split
        whole = -(-division.whole // _MULTIPROCESSORS) * (chunks * a_chunk + a_tile)
        shared = -(-division.shared * split // _MULTIPROCESSORS)
        return whole + shared * (-(-chunks // split) * a_chunk + a_shared)

    @staticmethod
    def _chunks(k: int) -> int:
        return -(-k // CHUNK_COLUMNS["int4"])

    def workspace(self, division: WideDivision) -> tuple[int, int]:
        """float32 values and counters that programs leave for each other."""
        return division.shared * division.split * self.block_n * self.block_m, division.shared


# Rows up to which int4 is multiplied from its nibbles, with sums of groups that are scaled outside of the tensor cores;
# and up to which it is scaled as it is unpacked. To write it as FP8 first costs less for more.
NIBBLE_ROWS, WIDE_ROWS = 64, 1024
_NARROW_NIBBLE_ROWS = 256
# Microseconds of a chunk of K in tiles of so many rows of x, what a tile costs besides, and one that programs share.
_WIDE_US = {256: (1.84, 4.7, 14.3), 128: (1.28, 6.1, 9.9), 64: (1.14, 6.0, 7.1), 16: (1.0, 6.0, 7.0)}
WIDE_MOST_SPLIT = 4
# Rows of x are there, if not all set, up to a multiple of this.
ROOM_ROWS = 256
_MULTIPROCESSORS = 132
# A product is divided among no more programs than these where its parts of K meet; so much they leave each other.
_MOST_SHARING = 2 * _MULTIPROCESSORS + 24
SHARED_FLOATS, SHARED_TILES = _MOST_SHARING * 128 * 256, _MOST_SHARING // 2
_Split = Literal[1, 2, 4, 8]
_SPLITS: tuple[_Split, ...] = (8, 4, 2, 1)


def rounded_config(
    n: int, k: int, rows: int, format: str, group: int = 128, *, zeros: bool = False
) -> RoundedConfig | WideConfig:
    """The division for a product of ``rows`` rows with weights ``[n, k]``, from sweeps on an H200. ``zeros``: groups
    have zero points."""
    narrow = group < 64  # too narrow for wide tiles
    if format == "fp8" or rows > (_NARROW_NIBBLE_ROWS if narrow else WIDE_ROWS):
        return fp8_config(n, k, rows)
    if narrow or rows <= NIBBLE_ROWS:
        return nibble_config(n, k, rows)
    return wide_config(n, k, rows, group, zeros=zeros)


def wide_config(n: int, k: int, rows: int, group: int, *, zeros: bool) -> WideConfig:
    """int4 that is scaled as it is unpacked."""
    tall = WideConfig(256, 2 if zeros and group == 64 else 3)  # so much shared memory there is
    configs = (WideConfig(128, 4), tall)
    return min(configs, key=lambda one: one.estimate_us(one.divide(n, rows, k), k))


def nibble_config(n: int, k: int, rows: int) -> RoundedConfig:
    """int4 as it is, group by group."""
    block_m = _block_m(rows)
    programs = -(-n // 128) * -(-rows // block_m)
    return RoundedConfig("int4", 128, block_m, 4, 4, _split(programs, k, least=8, most=8))


def fp8_config(n: int, k: int, rows: int) -> RoundedConfig:
    """FP8 weights."""
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
