"""Choices of the packed linear kernel: how a product is divided over warps and programs. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from firsttoken.core.errors import ConfigError

TILE = 16
# Columns of a chunk, which a warp loads at once.
CHUNK_COLUMNS = {"int4": 256, "fp8": 128}
MAX_ROWS = 64
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
