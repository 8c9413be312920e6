"""Eight-bit weights on the CPU: torch's own product for few rows, and the same bytes written out for many.

Activations stay bfloat16. Rounding them to eight bits a row as well, for oneDNN's integer products, was measured: twice
as fast at 8 to 32 rows, but of SmolLM2's likeliest tokens 89 % stayed the same instead of 95 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.quantization.rounded import RoundedWeight
from firsttoken.quantization.scratch import PIECE, Scratch

# torch's kernel reads so many columns at a time, also beyond the last.
_STEP = 16


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """``values`` int8 ``[N, K]`` times ``scale`` bfloat16 ``[N]``."""

    values: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


def fits_int8(weight: RoundedWeight) -> bool:
    """True for what the product takes as it is: a scale a row and no zero points."""
    return weight.format == "int8" and weight.group == 0 and weight.zeros is None


def pack_int8(weight: RoundedWeight) -> Int8Weight:
    """The same values, scales rounded to bfloat16. Raises ValueError unless `fits_int8`."""
    if not fits_int8(weight):
        raise ValueError(f"the kernel takes int8 with a scale a row, not {weight.format} in groups of {weight.group}")
    return Int8Weight(weight.values.contiguous(), weight.scales.bfloat16())


def kernel_takes(weight: Int8Weight) -> bool:
    """False for a number of columns at which torch's kernel reads beyond its operands."""
    return weight.values.shape[1] % _STEP == 0


class Int8Linear:
    """torch's 8-bit product with bfloat16 activations, for what `kernel_takes`."""

    __slots__ = ("_multiply", "bias", "weight")

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.bfloat16()
        self._multiply = torch.ops.aten._weight_int8pack_mm.default

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self.weight.values, self.weight.scale)
        return y if self.bias is None else y.add_(self.bias)


class WidenedInt8:
    """The product in bfloat16, of weights that are written out piece by piece: for many rows, without a second copy."""

    __slots__ = ("_rows", "_scratch", "bias", "nbytes", "weight")

    def __init__(self, weight: Int8Weight, bias: Tensor | None, scratch: Scratch, *, alone: bool = False) -> None:
        self.nbytes = weight.nbytes if alone else 0  # else it is the other form's memory
        self.weight = weight
        self.bias = None if bias is None else bias.bfloat16()
        self._scratch = scratch
        n, k = weight.values.shape
        self._rows = max(PIECE // k, 1)
        scratch.reserve(min(self._rows, n) * k)

    def __call__(self, x: Tensor) -> Tensor:
        n = self.weight.values.shape[0]
        y = torch.empty((x.shape[0], n), dtype=torch.bfloat16)
        for first in range(0, n, self._rows):
            part = self.weight.values[first : first + self._rows]
            wide = self._scratch.wide(part.numel()).view(part.shape).copy_(part)
            torch.mm(x, wide.t(), out=y[:, first : first + self._rows])
        if self.bias is None:
            return y.mul_(self.weight.scale)
        return torch.addcmul(self.bias, y, self.weight.scale)
