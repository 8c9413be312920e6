"""Configs worth measuring for a product, best guesses first. Needs no GPU: measuring is done in the decode graph."""

from __future__ import annotations

from collections.abc import Iterator

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import BUCKET_ROWS, BlockM, LinearConfig, OpKind, default_config, row_bucket

# (block_n, block_k, warps, stages). Long rows from registers won in the graph; deep copies win for the head.
_FMA = (
    (4, 2048, 8, 0), (8, 1024, 4, 0), (4, 1024, 4, 0), (16, 512, 4, 0), (8, 2048, 8, 0), (8, 512, 4, 0),
    (4, 2048, 4, 0), (16, 1024, 8, 0), (2, 2048, 4, 0), (2, 1024, 2, 0), (8, 256, 4, 0), (16, 256, 4, 0),
    (2, 4096, 4, 0), (4, 4096, 8, 0), (4, 4096, 4, 0), (2, 4096, 8, 0), (2, 2048, 2, 0),
    (16, 512, 4, 3), (16, 512, 8, 4), (8, 512, 4, 4), (16, 256, 4, 5), (8, 256, 4, 6), (4, 512, 2, 4),
)  # fmt: skip
# (block_n, block_k, warps, stages, split_k)
_DOT = (
    (64, 128, 4, 5, 1), (64, 128, 4, 3, 1), (32, 128, 4, 5, 1), (32, 256, 4, 4, 1), (64, 256, 4, 3, 1),
    (128, 128, 8, 4, 1), (128, 64, 8, 5, 1), (32, 128, 2, 4, 1), (16, 256, 4, 4, 1), (64, 64, 4, 6, 1),
    (64, 128, 4, 5, 2), (64, 256, 4, 3, 2), (32, 128, 4, 5, 2), (32, 256, 4, 4, 2), (64, 128, 4, 4, 3),
    (64, 128, 4, 4, 4), (32, 128, 2, 4, 4), (128, 128, 8, 3, 2), (16, 64, 2, 5, 2), (16, 128, 2, 4, 1),
)  # fmt: skip
# The same and prefetch, for 17 to 64 rows. Long blocks of K won; tall tiles read x less often.
_DOT_MANY = (
    (64, 128, 4, 4, 1, False), (128, 128, 8, 4, 1, False), (64, 128, 4, 4, 2, False), (128, 64, 8, 8, 1, False),
    (64, 256, 4, 3, 1, False), (64, 128, 4, 6, 1, False), (64, 128, 4, 3, 1, False), (64, 128, 8, 4, 1, False),
    (128, 64, 4, 4, 1, False), (128, 128, 8, 4, 2, False), (64, 256, 4, 3, 2, False), (256, 64, 8, 5, 1, False),
    (128, 128, 4, 4, 1, False), (64, 128, 4, 4, 1, True), (128, 128, 8, 3, 1, False), (64, 256, 8, 3, 1, False),
    (64, 128, 4, 6, 2, False), (64, 128, 4, 4, 3, False), (128, 64, 8, 4, 1, False), (128, 128, 8, 4, 4, False),
    (128, 64, 4, 4, 2, False), (64, 64, 4, 6, 1, False), (64, 128, 4, 3, 4, False), (128, 64, 8, 8, 2, False),
    (32, 128, 4, 5, 1, False), (32, 128, 4, 5, 2, False), (32, 256, 4, 4, 1, False), (64, 64, 4, 6, 2, False),
    (32, 64, 4, 6, 1, False), (32, 64, 4, 6, 2, False),
)  # fmt: skip
_MOST_MANY = 24
_MIN_PROGRAMS, _MAX_PROGRAMS = 64, 1 << 16
# Two programs a multiprocessor: with so many tiles of many rows, splitting K only moves more sums.
_ENOUGH_TILES = 264


def candidates(kind: OpKind, n: int, k: int, rows: int) -> list[LinearConfig]:
    """Different configs that fit the product over weights ``[n, k]``, the default first.

    Raises `ConfigError` for rows that the small kernels do not take.
    """
    block_m = BUCKET_ROWS[row_bucket(rows)]
    listed = [default_config(kind, n, k, rows)]
    for config in _one_row(k) if block_m == 1 else _few(block_m) if block_m <= 16 else _many(block_m):
        if config not in listed and _worth_it(config, kind, n, k):
            listed.append(config)
    return listed[:_MOST_MANY] if block_m > 16 else listed


def _one_row(k: int) -> Iterator[LinearConfig]:
    for fma in _FMA:
        # A block that is not longer than the row, or the one that just holds it.
        if fma[1] < 2 * k:
            yield LinearConfig("fma", *fma)  # type: ignore[arg-type]
    yield LinearConfig("fma", 4, 64, 1, 0)
    yield LinearConfig("fma", 8, 64, 2, 4)


def _few(least: BlockM) -> Iterator[LinearConfig]:
    for block_n, block_k, warps, stages, split_k in _DOT:
        for prefetch in (False, True):
            yield LinearConfig("dot", block_n, block_k, warps, stages, least, split_k, prefetch)  # type: ignore[arg-type]
            # 16 rows make the wide tensor instructions possible, which are at times faster even for 8.
            if least == 8 and block_n >= 64 and not prefetch:
                yield LinearConfig("dot", block_n, block_k, warps, stages, 16, split_k)  # type: ignore[arg-type]


def _many(block_m: BlockM) -> Iterator[LinearConfig]:
    for block_n, block_k, warps, stages, split_k, prefetch in _DOT_MANY:
        yield LinearConfig("dot", block_n, block_k, warps, stages, block_m, split_k, prefetch)  # type: ignore[arg-type]


def _worth_it(config: LinearConfig, kind: OpKind, n: int, k: int) -> bool:
    try:
        config.check(kind, n, k)
    except ConfigError:
        return False
    programs = config.tiles(n) * config.split_k
    if config.block_m > 16 and config.split_k > 1 and config.tiles(n) >= _ENOUGH_TILES:
        return False
    few = programs < min(_MIN_PROGRAMS, -(-n // (16 if config.block_m <= 16 else 32)))
    return not few and programs <= _MAX_PROGRAMS and config.block_k < 2 * max(k, 64)
