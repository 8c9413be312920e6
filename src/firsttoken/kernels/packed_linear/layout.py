"""How packed weights lie in memory.

int4: in the order of the registers of one tensor instruction (m16n8k16). A tile is 16 rows of W. A lane of the warp
that multiplies it, ``lane = 4 g + t``, holds rows g and g + 8 at four neighbouring columns for each instruction, and
reads 16 bytes at a time: of 64 columns, a *block*. Of each 32 columns lane t of a group of four takes the t-th eight,
in W and in x, so both are read 16 bytes at a time and nothing moves between lanes. ``words`` is int32 ``[tiles, K / 64,
32 lanes, 4]``; ``scales`` bf16 ``[tiles, K / 256, 16 rows, 256 / group]``, so that a lane reads what it needs of 256
columns in one load a row; ``zeros``, where groups have zero points, lies like it. Rows are padded to tiles and columns
to 256 with zeros.

FP8: as it comes, float8_e4m3fn ``[N, K]``, with float32 ``scales [N]``: a lane's bytes of a row are 16 in a line, and
the vendor's library reads the same matrix where rows of x are many.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

PackedFormat = Literal["int4", "fp8"]
TILE = 16
# Columns that a warp loads at once.
CHUNK: dict[PackedFormat, int] = {"int4": 256, "fp8": 128}
GROUPS = (32, 64, 128)
FP8_MAX = 448.0
_INT4_AS_FP8_MAX = 256.0
# The column of 64 that each byte of a row of int4 holds: row g and row g + 8 of a tile are halves of the same bytes.
BYTE_COLUMNS = tuple(p % 16 // 8 * 32 + p // 16 * 8 + p // 4 % 2 * 4 + p % 2 * 2 + p % 4 // 2 for p in range(64))


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """``[n, k]`` weights. int4: ``group`` columns of a row share a scale, values are -8 to 7. FP8 (e4m3): one scale a
    row, ``group`` is 0.

    ``zeros`` holds 136 more than each group's zero point of int4 values (-8 to 7), as bf16: what is taken from the 128
    + nibble that values are unpacked to. None: all are 136."""

    format: PackedFormat
    n: int
    k: int
    group: int
    words: Tensor
    scales: Tensor
    row_scales: Tensor | None = None  # of int4 when it is written as FP8, float32 [n]
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        more = sum(part.nbytes for part in (self.row_scales, self.zeros) if part is not None)
        return self.words.nbytes + self.scales.nbytes + more

    @property
    def chunks(self) -> int:
        """Chunks of columns that a row has."""
        return -(-self.k // CHUNK[self.format])

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE)


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
    """``values`` int8 ``[N, K]``, -8 to 7, ``scales`` ``[N, K / group]`` and, of the same shape, the values that mean 0
    (None: 0 does). Scales are rounded to bfloat16. Raises ValueError where they do not fit.

    Bits 0-3 and 16-19 of a word are row g's first two columns, 4-7 and 20-23 those of row g + 8, 8-11 and 24-27 row
    g's other two, 12-15 and 28-31 those of row g + 8; each is stored plus 8.
    """
    n, k = values.shape
    groups = scales.shape[1]
    fits = zeros is None or zeros.shape == scales.shape
    if groups == 0 or k % groups or k // groups not in GROUPS or scales.shape[0] != n or not fits:
        raise ValueError(
            f"scales {list(scales.shape)} do not fit int4 weights {list(values.shape)}: one for each "
            f"{', '.join(map(str, GROUPS))} columns of a row is needed"
        )
    group = k // groups
    parts = _int4_parts(_padded(values, CHUNK["int4"]) + 8)
    words = torch.zeros(parts.shape[:6], dtype=torch.int32, device=values.device)
    for half, pair, column in product(range(2), repeat=3):
        words |= parts[..., half, pair, column].to(torch.int32) << (4 * half + 8 * pair + 16 * column)
    # A bound on each row's largest value, so that none is beyond what e4m3 holds. Where 0 means 0 it is a power of two
    # times the largest scale: e4m3 then holds that group's weights exactly, and all of a row that has one scale.
    farthest = 8 if zeros is None else zeros.float().add(0.5).abs() + 7.5
    rows = ((scales.float().abs() * farthest).amax(1) / _INT4_AS_FP8_MAX).clamp_min(1e-30).contiguous()
    return PackedWeight(
        "int4",
        n,
        k,
        group,
        words.reshape(parts.shape[0], parts.shape[1], 32, 4),
        _arranged(scales.bfloat16(), group),
        rows,
        None if zeros is None else _arranged(zeros.bfloat16() + 136, group),
    )


def _arranged(scales: Tensor, group: int) -> Tensor:
    """``[N, K / group]`` as lanes read them."""
    each = CHUNK["int4"] // group
    wide = _padded(scales, each)
    return wide.view(-1, TILE, wide.shape[1] // each, each).permute(0, 2, 1, 3).contiguous()


def pack_fp8(values: Tensor, scales: Tensor) -> PackedWeight:
    """``values`` float8_e4m3fn ``[N, K]`` and ``scales`` ``[N]``. Raises ValueError where they do not fit."""
    n, k = values.shape
    if scales.shape != (n,) or values.dtype != torch.float8_e4m3fn or not values.is_contiguous():
        raise ValueError(
            f"FP8 weights are contiguous float8_e4m3fn [N, K] with a scale a row, got {values.dtype} "
            f"{list(values.shape)} {values.stride()} and scales {list(scales.shape)}"
        )
    return PackedWeight("fp8", n, k, 0, values, scales.float().contiguous())


def empty_packed(
    format: PackedFormat, n: int, k: int, group: int, device: torch.device, *, zeros: bool = False
) -> PackedWeight:
    """Room for weights of that size, such as they will be; ``zeros``: with zero points."""
    if format == "fp8":
        values = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=device)
        return PackedWeight("fp8", n, k, 0, values, torch.empty(n, dtype=torch.float32, device=device))
    tiles, chunks = -(-n // TILE), -(-k // CHUNK["int4"])
    words = torch.empty((tiles, chunks * 4, 32, 4), dtype=torch.int32, device=device)
    scales = torch.empty((tiles, chunks, TILE, CHUNK["int4"] // group), dtype=torch.bfloat16, device=device)
    rows = torch.empty(n, dtype=torch.float32, device=device)
    points = torch.empty(scales.shape, dtype=scales.dtype, device=device) if zeros else None
    return PackedWeight("int4", n, k, group, words, scales, rows, points)


def unpack(weight: PackedWeight) -> Tensor:
    """The weights that are meant, float32 ``[n, k]``."""
    if weight.format == "fp8":
        return weight.words.float() * weight.scales[:, None]
    words = weight.words.view(weight.words.shape[0], -1, 8, 4, 2, 2)
    values = torch.empty(len(words) * TILE, words.shape[1] * 64, dtype=torch.float32, device=words.device)
    parts = _int4_parts(values)
    for half, pair, column in product(range(2), repeat=3):
        parts[..., half, pair, column] = ((words >> (4 * half + 8 * pair + 16 * column)) & 15).float() - 8
    if weight.zeros is not None:
        values -= _by_columns(weight.zeros - 136, weight)
    return (values * _by_columns(weight.scales, weight))[: weight.n, : weight.k]


def _by_columns(arranged: Tensor, weight: PackedWeight) -> Tensor:
    """What `_arranged` has put in order, float32, one for each column."""
    rows = arranged.shape[0] * TILE
    return arranged.float().permute(0, 2, 1, 3).reshape(rows, -1).repeat_interleave(weight.group, 1)


def _int4_parts(values: Tensor) -> Tensor:
    """A view ``[tile, block, g, t, 32 columns, instruction of those, half, pair, column of the pair]``."""
    split = values.view(-1, 2, 8, values.shape[1] // 64, 2, 4, 2, 2, 2)
    return split.permute(0, 3, 2, 5, 4, 6, 1, 7, 8)


def _padded(values: Tensor, columns: int) -> Tensor:
    """With whole tiles of rows and a multiple of ``columns``, by zeros."""
    n, k = values.shape
    out = torch.zeros(-(-n // TILE) * TILE, -(-k // columns) * columns, dtype=values.dtype, device=values.device)
    out[:n, :k] = values
    return out
