"""Four-bit weights on the CPU: torch's own product for few rows, and the same bytes written out for many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.kernels.packed_linear.config import int4_group
from firsttoken.quantization.gguf_torch import GROUP, FourBit, four_bit
from firsttoken.quantization.rounded import RoundedWeight
from firsttoken.quantization.scratch import PIECE, Scratch
from firsttoken.quantization.stored import StoredTensor

# Rows that are packed together where there is AVX-512: the last 16, 32 or 48 of a matrix lie in another order.
BLOCK = 64
_HALF = BLOCK // 2
# Turns each of 16 codes of 0 to 15 into two's complement of the code less 8.
_FLIP = -0x7777777777777778
_PACKED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """``[rows, columns]`` weights ``(code - 8) * scale + zero``. ``packed`` uint8 ``[N, columns / 2]`` as torch packs
    codes, ``scale_and_zero`` bfloat16 ``[columns / group, N, 2]``; N is ``rows`` filled up to whole blocks.
    ``plain``: all zeros are 0."""

    rows: int
    columns: int
    group: int
    packed: Tensor
    scale_and_zero: Tensor
    plain: bool

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale_and_zero.nbytes


def pack_four_bit(weight: FourBit) -> Int4Weight:
    """Q4_0 and Q4_1 fit but for the rounding of scale and zero to bfloat16. The zero makes up for the scale's on the
    mean of each group."""
    scale = weight.scale.bfloat16()
    zero = _zero_for(weight, scale.float()).bfloat16()
    return _pack(weight.codes, scale, zero, GROUP)


def pack_rounded(weight: RoundedWeight) -> Int4Weight:
    """The same values and zero points, scales rounded to bfloat16; one that more than 128 columns share is repeated.
    Raises ValueError unless they are int4 in groups of a multiple of 32."""
    group = int4_group(weight.group or weight.shape[1])
    if weight.format != "int4" or group == 0:
        raise ValueError(
            f"the kernel takes int4 in groups of 32, 64 or 128, not {weight.format} of {weight.group} columns"
        )
    weight = weight.in_groups(group)
    scale = weight.scales.bfloat16()
    zero = None if weight.zeros is None else weight.zeros * -scale
    return _pack(weight.values, scale, zero, group, 8)


def packed_as_stored(weight: StoredTensor) -> Int4Weight | None:
    """Four bits that the file holds already, without rounding values again; None for other weights, and for groups
    that the kernel does not take."""
    if weight.is_four_bit:
        return pack_four_bit(four_bit(weight.data, weight.type))
    kept = weight.rounded
    if kept is None or kept.format != "int4" or int4_group(kept.group or kept.shape[1]) == 0:
        return None
    return pack_rounded(kept)


def _pack(codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, shift: int = 0) -> Int4Weight:
    """``codes [N, K]`` plus ``shift`` are 0 to 15; ``scale`` and ``zero`` bfloat16 ``[N, K / group]``."""
    rows, columns = codes.shape
    filled = -(-rows // BLOCK) * BLOCK
    both = torch.zeros((scale.shape[1], filled, 2), dtype=torch.bfloat16)
    both[:, :rows, 0] = scale.T
    if zero is not None:
        both[:, :rows, 1] = zero.T
    packed = torch.empty((filled, columns // 2), dtype=torch.uint8)
    for first, piece in _whole_blocks(codes):
        packed[first : first + len(piece)] = torch._convert_weight_to_int4pack_for_cpu(piece.add_(shift), 2)
    return Int4Weight(rows, columns, group, packed, both, zero is None)


def _whole_blocks(codes: Tensor) -> Iterator[tuple[int, Tensor]]:
    """As int32, since that is what packing takes: in pieces, the last filled up with zeros."""
    rows, columns = codes.shape
    step = max(_PACKED_AT_ONCE // (columns * BLOCK), 1) * BLOCK
    for first in range(0, rows, step):
        part = codes[first : first + step]
        piece = torch.zeros((-(-len(part) // BLOCK) * BLOCK, columns), dtype=torch.int32)
        piece[: len(part)] = part
        yield first, piece


def _zero_for(weight: FourBit, scale: Tensor) -> Tensor:
    """The value of code 8, ``[N, K / 32]`` float32, that keeps a block's mean when its scale becomes ``scale``."""
    mean_code = weight.codes.view(*scale.shape, GROUP).sum(-1, dtype=torch.int16).float().div_(GROUP)
    return weight.offset + mean_code * (weight.scale - scale) + scale * 8.0


class Int4Linear:
    """torch's 4-bit product: bfloat16 activations, one scale and one zero for a group. Bound by reading weights up to
    some rows, then by its own arithmetic, which does not use the matrix instructions."""

    __slots__ = ("_multiply", "bias", "weight")

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.bfloat16()
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        y: Tensor = self._multiply(x, weight.packed, weight.group, weight.scale_and_zero)
        return _finished(y, weight.rows, self.bias)


class WidenedInt4:
    """The product in bfloat16, of weights that are written out piece by piece: for many rows, without a second copy.
    Reads the order that `layout_is_known` checks."""

    __slots__ = ("_blocks", "_scratch", "bias", "nbytes", "weight")

    def __init__(self, weight: Int4Weight, bias: Tensor | None, scratch: Scratch) -> None:
        self.nbytes = 0  # it is the other form's memory
        self.weight = weight
        self.bias = None if bias is None else bias.bfloat16()
        self._scratch = scratch
        self._blocks = max(PIECE // (weight.columns * BLOCK), 1)
        scratch.reserve(min(self._blocks, weight.packed.shape[0] // BLOCK) * weight.columns * BLOCK)

    def __call__(self, x: Tensor) -> Tensor:
        rows, blocks = x.shape[0], self.weight.packed.shape[0] // BLOCK
        y = torch.empty((rows, blocks, 2, _HALF), dtype=torch.bfloat16)
        for first in range(0, blocks, self._blocks):
            count = min(self._blocks, blocks - first)
            part = torch.mm(x, self._widened(first, count))
            y[:, first : first + count] = part.view(rows, 2, count, _HALF).transpose(1, 2)
        return _finished(y.view(rows, -1), self.weight.rows, self.bias)

    def _widened(self, first: int, count: int) -> Tensor:
        """``[K, count * BLOCK]`` bfloat16, rounded once: the first halves of all blocks, then the second."""
        weight, columns = self.weight, self.weight.columns
        low, high = self._scratch.bytes(columns * count * _HALF)
        words = weight.packed.view(-1, columns, _HALF).view(torch.int64)[first : first + count]
        torch.bitwise_xor(words.transpose(0, 1), _FLIP, out=high.view(torch.int64).view(columns, count, -1))
        torch.bitwise_left_shift(high, 4, out=low).bitwise_right_shift_(4)
        high.bitwise_right_shift_(4)
        wide = self._scratch.wide(columns * count * BLOCK).view(columns, 2, count * _HALF)
        wide[:, 0] = low.view(columns, -1)
        wide[:, 1] = high.view(columns, -1)
        groups = wide.view(-1, weight.group, count * BLOCK)
        scale, zero = self._scales(first, count)
        if weight.plain:
            groups.mul_(scale)
        else:
            torch.addcmul(zero, groups, scale, out=groups)
        return wide.view(columns, -1)

    def _scales(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Each ``[groups, 1, count * BLOCK]``, in the order of `_widened`."""
        both = self.weight.scale_and_zero[:, first * BLOCK : (first + count) * BLOCK]
        ordered = both.view(-1, count, 2, _HALF, 2).permute(4, 0, 2, 1, 3).reshape(2, both.shape[0], 1, -1)
        return ordered[0], ordered[1]


def layout_is_known() -> bool:
    """True where torch packs as `WidenedInt4` reads: low and high nibbles of 32 bytes are a column of 64 rows."""
    codes = torch.randint(16, (2 * BLOCK, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2).view(2, 32, _HALF)
    return torch.equal(torch.cat((packed & 15, packed >> 4), -1).transpose(1, 2).reshape(codes.shape).int(), codes)


def _finished(y: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    """Without the rows of W that fill it up, with the bias."""
    if y.shape[1] != rows:
        y = y[:, :rows].contiguous()
    return y if bias is None else y.add_(bias)
