"""Shapes of the GPU attention kernels' work: tiles, splits, and the host's list of prefill tiles. Without Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from firsttoken.kernels.launch import next_power_of_two

PAGE = 16
Combine = Literal["words", "counter"]


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention divides its work.

    ``block_tokens``: keys a tile. ``splits``: programs a (row, KV head); a row's own length decides on the device how
    many of them have work. ``min_split``: least keys worth a split of their own. ``stages``: tiles in flight in the
    loop. ``dot``: matrix cores (any group) or CUDA cores (no exchange between threads, for small groups). ``combine``:
    how splits meet, see `triton_decode`. ``max_registers`` a thread lets more programs share an SM.
    Raises ValueError for sizes the kernel cannot have.
    """

    block_tokens: int = 32
    splits: int = 16
    min_split: int = 32
    warps: int = 4
    stages: int = 3
    dot: bool = True
    combine: Combine = "counter"
    max_registers: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_tokens", "splits", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.block_tokens < PAGE:
            raise ValueError(f"block_tokens must be at least the {PAGE} tokens of a page, got {self.block_tokens}")
        if self.min_split < 1 or self.min_split % self.block_tokens:
            raise ValueError(f"min_split must be a multiple of block_tokens={self.block_tokens}, got {self.min_split}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        if self.combine not in ("words", "counter"):
            raise ValueError(f"combine must be 'words' or 'counter', got {self.combine!r}")


def decode_config(rows: int, kv_heads: int, head_dim: int, max_context: int, sms: int) -> DecodeConfig:
    """A good division for ``rows`` decode rows (the graph's bucket) of at most ``max_context`` tokens on ``sms`` SMs.

    Few rows: enough splits that one wave covers about all SMs once, with a whole short split fetched before the
    kernel waits for its predecessor. Many rows: one split a row, unless long contexts would leave one SM with a row
    that others could share.
    """
    programs = max(1, rows * kv_heads)
    tile = 64 if head_dim <= 64 else 32
    warps = 4 if head_dim <= 128 else 8
    longest = next_power_of_two(max(1, -(-max_context // tile)))
    if programs >= 2 * sms:
        # One split a row fills the GPU, and each further one costs programs that leave at once. An SM reads 113 GB/s
        # alone, so only a row far longer than the rest is worth sharing.
        splits = 4 if max_context > 16384 else 1
        registers = 128 if warps == 4 else None
        return DecodeConfig(tile, splits, min_split=4096, warps=warps, stages=4, max_registers=registers)
    # Two at least: a single program on each SM would leave it idle between its tiles.
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
    """Cut chunks into tiles ``int32 [NT, 4]`` of (slot, first token row, first position, tokens), longest work first.

    Chunk ``i`` holds ``counts[i]`` tokens (0 or more) from position ``starts[i]`` of ``slots[i]``; its token rows
    begin at ``rows[i]``. All arguments are one-dimensional and equally long.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens must be at least 1, got {tile_tokens}")
    per_chunk = -(-counts // tile_tokens)
    chunk = np.repeat(np.arange(len(counts)), per_chunk)
    first = np.cumsum(per_chunk) - per_chunk
    offset = (np.arange(len(chunk)) - first[chunk]) * tile_tokens
    tiles = np.empty((len(chunk), 4), np.int32)
    tiles[:, 0] = slots[chunk]
    tiles[:, 1] = rows[chunk] + offset
    tiles[:, 2] = starts[chunk] + offset
    tiles[:, 3] = np.minimum(counts[chunk] - offset, tile_tokens)
    order = np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")
    return tiles[order]
