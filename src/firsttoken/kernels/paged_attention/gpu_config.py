"""Shapes of the GPU attention kernels' work: tiles, splits, and the host's list of prefill tiles. Without Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from firsttoken.kernels.launch import next_power_of_two

PAGE = 16
# Of an attention tile's description, see `make_tiles`.
TILE_WORDS = 5
# Parts that a combining program may hold at once, whatever its registers would bear.
_MOST_AT_ONCE = 16
# Programs of 128 threads with 128 registers that an SM holds.
_RESIDENT = 4


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Decode attention in a fixed number of splits a row.

    ``block_tokens``: keys a tile. ``splits``: programs a (row, KV head); a row's own length decides on the device how
    many of them have work. ``min_split``: least keys worth a split of their own. ``stages``: tiles in flight in the
    loop. ``dot``: matrix cores (any group) or CUDA cores (no exchange between threads, for small groups).
    ``max_registers`` a thread lets more programs share an SM. Raises ValueError for sizes the kernel cannot have.
    """

    block_tokens: int = 32
    splits: int = 16
    min_split: int = 32
    warps: int = 4
    stages: int = 3
    dot: bool = True
    max_registers: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self.block_tokens, self.warps, self.stages)
        _check_power("splits", self.splits)
        _check_multiple("min_split", self.min_split, self.block_tokens)

    def cells(self, rows: int) -> int:
        """Parts of a KV head that the workspace must hold: beside the splits' parts comes the new token's."""
        return rows * (self.splits + 1) if self.splits > 1 else 0

    @property
    def most_parts(self) -> int:
        """A power of two: how many parts the last program should load at once, at most."""
        return min(next_power_of_two(self.splits + 1), _MOST_AT_ONCE)


@dataclass(frozen=True, slots=True)
class BalancedConfig:
    """Decode attention with the keys of all rows dealt out evenly: ``programs`` a KV head, more than there are rows,
    ``min_share`` the fewest keys worth a program. The rest as in `DecodeConfig`."""

    programs: int
    block_tokens: int = 32
    min_share: int = 64
    warps: int = 4
    stages: int = 3
    dot: bool = True
    max_registers: int | None = 128

    def __post_init__(self) -> None:
        _check_sizes(self.block_tokens, self.warps, self.stages)
        if self.programs < 2:
            raise ValueError(f"programs must be at least 2, got {self.programs}")
        _check_multiple("min_share", self.min_share, self.block_tokens)

    def cells(self, rows: int) -> int:
        """As `DecodeConfig.cells`: each program leaves one part at most."""
        return self.programs

    @property
    def most_parts(self) -> int:
        """As `DecodeConfig.most_parts`; most rows have few."""
        return 4


def _check_sizes(block_tokens: int, warps: int, stages: int) -> None:
    _check_power("block_tokens", block_tokens)
    _check_power("warps", warps)
    if block_tokens < PAGE:
        raise ValueError(f"block_tokens must be at least the {PAGE} tokens of a page, got {block_tokens}")
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")


def _check_power(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value}")


def _check_multiple(name: str, value: int, block_tokens: int) -> None:
    if value < 1 or value % block_tokens:
        raise ValueError(f"{name} must be a multiple of block_tokens={block_tokens}, got {value}")


def decode_config(
    rows: int, kv_heads: int, head_dim: int, max_context: int, sms: int, rounded: bool = False
) -> DecodeConfig | BalancedConfig:
    """A good division for ``rows`` decode rows (the graph's bucket) of at most ``max_context`` tokens on ``sms`` SMs,
    of K and V as activations are or ``rounded``.

    Few rows: enough splits that one wave covers about all SMs once, with a whole short split fetched before the
    kernel waits for its predecessor. Many rows: their keys dealt out evenly, to about twice as many programs as there
    are rows, or a wave of them.
    """
    programs = max(1, rows * kv_heads)
    # Up to 16 KiB of K and V; rounded keys are rows of a matrix product, whose tiles have 64.
    tile = 64 if head_dim <= (128 if rounded else 64) else 32
    warps = 4 if head_dim <= 128 else 8
    longest = next_power_of_two(max(1, -(-max_context // tile)))
    if 2 * programs > sms:
        shares = max(2 * rows, -(-_RESIDENT * sms // kv_heads))
        return BalancedConfig(shares, tile, min_share=2 * tile, warps=warps, max_registers=128 if warps == 4 else None)
    splits = 2
    most = 16 if programs > 4 else 32
    while splits * programs <= sms and splits < most:
        splits *= 2
    return DecodeConfig(tile, min(splits, longest), min_split=tile, warps=warps)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiles of prefill attention: ``block_m`` query rows by ``block_n`` keys; ``pack`` query heads of one group share
    a tile (each of ``block_m / pack`` tokens). Raises ValueError for sizes the kernel cannot have."""

    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    stages: int = 2
    pack: int = 1

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "warps", "pack"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.block_m < 16 or self.block_n < PAGE or self.pack > self.block_m:
            raise ValueError(
                f"a tile needs block_m >= 16, block_n >= {PAGE} and pack <= block_m, "
                f"got {self.block_m}, {self.block_n}, {self.pack}"
            )

    @property
    def tile_tokens(self) -> int:
        """Query tokens a tile: what `make_tiles` cuts chunks by."""
        return self.block_m // self.pack


def prefill_config(head_dim: int) -> PrefillConfig:
    """Tiles that fit an H200's registers and shared memory for this head size.

    For heads of 128, measured in the captured prefill of an 8B: small tiles and so two programs an SM take 200 ms for
    8,192 tokens where tiles of 128 x 128 take 216, and are within noise of them up to 2,048 tokens.
    """
    if head_dim <= 64:
        return PrefillConfig(block_n=128, stages=3)
    if head_dim <= 128:
        return PrefillConfig(block_m=64, block_n=64, warps=4, stages=3)
    return PrefillConfig(block_n=32, stages=3)


def make_tiles(
    starts: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int32],
    tile_tokens: int,
) -> npt.NDArray[np.int32]:
    """Cut chunks into tiles ``int32 [NT, 5]``, longest work first: slot, first token row, first position, tokens, and
    the position where the chunk begins.

    Chunk ``i`` holds ``counts[i]`` tokens (0 or more) from position ``starts[i]`` of ``slots[i]``; its token rows
    begin at ``rows[i]``. All arguments are one-dimensional and equally long.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens must be at least 1, got {tile_tokens}")
    per_chunk = -(-counts // tile_tokens)
    chunk = np.repeat(np.arange(len(counts)), per_chunk)
    first = np.cumsum(per_chunk) - per_chunk
    offset = (np.arange(len(chunk)) - first[chunk]) * tile_tokens
    tiles = np.empty((len(chunk), TILE_WORDS), np.int32)
    tiles[:, 0] = slots[chunk]
    tiles[:, 1] = rows[chunk] + offset
    tiles[:, 2] = starts[chunk] + offset
    tiles[:, 3] = np.minimum(counts[chunk] - offset, tile_tokens)
    tiles[:, 4] = starts[chunk]
    order = np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")
    return tiles[order]


def make_tiles_of_one(start: int, count: int, slot: int, row: int, tile_tokens: int) -> npt.NDArray[np.int32]:
    """`make_tiles` of one chunk, which a first token waits for, at a fraction of the cost; ``count`` is 1 or more."""
    offsets = np.arange(-(-count // tile_tokens) * tile_tokens - tile_tokens, -1, -tile_tokens, dtype=np.int32)
    tiles = np.empty((len(offsets), TILE_WORDS), np.int32)
    tiles[:] = slot, row, start, tile_tokens, start
    tiles[:, 1:3] += offsets[:, None]
    tiles[0, 3] = count - offsets[0]
    return tiles
