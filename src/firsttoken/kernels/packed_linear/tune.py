"""Configs worth measuring for a packed product. Needs no GPU: measuring is done in the decode graph.

What a multiprocessor does in the 400 clocks in which memory gives it 8 KiB of int4, four warps' chunks, for eight rows
of x, by count of what is compiled for sm_90: 270 instructions a warp, of which shifts and logic take 250 clocks, and
320 clocks of the first-level cache, 256 of them for x, whose eight rows lie apart. Two tiles a warp share those.
"""

from __future__ import annotations

from itertools import product

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import BUCKET_ROWS, LinearConfig, row_bucket
from firsttoken.kernels.packed_linear.config import CHUNK_COLUMNS, PackedConfig, default_config

# Of one row of FP8 weights: what was best, and what is near it.
_ROW = (
    LinearConfig("fma", 8, 512, 2, 4), LinearConfig("fma", 8, 1024, 4, 3), LinearConfig("fma", 16, 256, 4, 5),
    LinearConfig("fma", 16, 512, 4, 3), LinearConfig("fma", 8, 512, 4, 4), LinearConfig("fma", 8, 1024, 4, 0),
    LinearConfig("fma", 8, 2048, 8, 0), LinearConfig("fma", 4, 2048, 4, 0), LinearConfig("fma", 4, 1024, 2, 0),
    LinearConfig("fma", 4, 4096, 8, 0), LinearConfig("fma", 16, 1024, 8, 0),
)  # fmt: skip
# Warps of all programs: fewer leave multiprocessors without work, more have no columns left to divide.
_FEWEST_WARPS, _MOST_WARPS = 400, 16_000


def candidates(n: int, k: int, rows: int, format: str) -> list[PackedConfig]:
    """Different configs that fit weights ``[n, k]``, the rule's own first, then by how near their number of warps is
    to its. Raises `ConfigError` for more than 64 rows."""
    own = default_config(n, k, rows, format)
    chunks = -(-k // CHUNK_COLUMNS[format])
    block_m = max(8, BUCKET_ROWS[row_bucket(rows)])
    found = []
    for row_warps, column_warps, ahead, tiles in product((1, 2, 4), (1, 2, 4, 8, 16), (1, 2), (1, 2)):
        config = PackedConfig(row_warps, column_warps, block_m, ahead, tiles)  # type: ignore[arg-type]
        # Registers: more rows' sums leave no room for loads that run two chunks ahead, nor for two tiles' of them.
        wide = block_m > 16 and (ahead == 2 or (tiles == 2 and block_m == 64 and column_warps > 1))
        if config != own and not wide and _fits(config, chunks) and _worth_it(config, n):
            found.append(config)
    warps = own.tiles(n) * own.warps
    found.sort(key=lambda one: abs(one.tiles(n) * one.warps - warps))
    return [own, *found]


def row_candidates(k: int) -> list[LinearConfig]:
    """Configs of `fp8_row_linear` for rows of ``k`` columns."""
    return [config for config in _ROW if config.block_k < 2 * k]


def _fits(config: PackedConfig, chunks: int) -> bool:
    try:
        config.check(chunks)
    except ConfigError:
        return False
    return True


def _worth_it(config: PackedConfig, n: int) -> bool:
    return _FEWEST_WARPS <= config.tiles(n) * config.warps <= _MOST_WARPS
