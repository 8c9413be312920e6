"""Weights kept in the fewest bytes for few rows, and in bfloat16 for many."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.quantization.gguf_torch import GROUP, FourBit, four_bit
from firsttoken.quantization.linear import ByRows, FusedGate, GatedLinear, Linear
from firsttoken.quantization.stored import StoredTensor
from firsttoken.quantization.unpacked import UnpackedMethod

# Up to here the 4-bit product, which is bound by reading weights, beats the bfloat16 one: 11.5 against 14.0 ms for all
# layers of the default model at 8 rows, 16.8 against 15.7 at 12 (two Zen 4 cores).
INT4_ROWS = 8


class Int4Linear:
    """torch's 4-bit CPU product: bfloat16 activations, one scale and one zero for 32 weights.

    It computes ``(code - 8) * scale + zero`` with both in bfloat16: Q4_1 and Q4_0 fit but for that rounding.
    The zero makes up for the scale's rounding on the mean of each block.
    """

    __slots__ = ("_multiply", "bias", "scale_and_zero", "weight")

    def __init__(self, weight: FourBit, bias: Tensor | None) -> None:
        scale = weight.scale.bfloat16()
        zero = _zero_for(weight, scale.float())
        self.weight = torch._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 2)
        self.scale_and_zero = torch.stack((scale, zero.bfloat16()), dim=-1).transpose(0, 1).contiguous()
        self.bias = None if bias is None else bias.bfloat16()
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @classmethod
    def fits(cls, weight: StoredTensor) -> bool:
        """True when the kernel takes a matrix of this shape and type."""
        rows, columns = weight.shape
        return weight.is_four_bit and rows % 16 == 0 and columns % GROUP == 0

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale_and_zero.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self.weight, GROUP, self.scale_and_zero)
        return y if self.bias is None else y.add_(self.bias)


def _zero_for(weight: FourBit, scale: Tensor) -> Tensor:
    """The value of code 8, ``[N, K / 32]`` float32, that keeps a block's mean when its scale becomes ``scale``."""
    mean_code = weight.codes.view(*scale.shape, GROUP).sum(-1, dtype=torch.int16).float().div_(GROUP)
    return weight.offset + mean_code * (weight.scale - scale) + scale * 8.0


class PackedMethod:
    """4-bit weights for up to `INT4_ROWS` rows and prepacked bfloat16 above; other types in bfloat16 only.

    Keeps both forms, since prefill is bound by arithmetic and decode by bytes. Deterministic for a given number of
    rows; the two forms differ by bfloat16 rounding of weights.
    """

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._unpacked = UnpackedMethod(torch.bfloat16)

    def linear(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        if not Int4Linear.fits(weight):
            return self._unpacked.linear(weight, bias)
        codes = four_bit(weight.data, weight.type)
        dense = StoredTensor.dense(weight.name, codes.dequantize(torch.bfloat16))
        return ByRows(Int4Linear(codes, bias), self._unpacked.linear(dense, bias), INT4_ROWS)

    def gated(self, weight: StoredTensor, bias: Tensor | None) -> GatedLinear:
        return FusedGate(self.linear(weight, bias))
