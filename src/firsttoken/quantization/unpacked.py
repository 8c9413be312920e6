"""Weights as plain matrices, prepacked for oneDNN where that is possible."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firsttoken.quantization.linear import FusedGate, GatedLinear, Linear
from firsttoken.quantization.row_table import RowTable
from firsttoken.quantization.stored import StoredTensor


def can_prepack(dtype: torch.dtype) -> bool:
    """True when this machine's oneDNN multiplies ``dtype`` matrices with prepacked weights."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PlainLinear:
    """``F.linear`` on an ordinary matrix: works everywhere."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.to(weight.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PrepackedLinear:
    """oneDNN with the weight reordered once; about twice as fast as ``F.linear``, which reorders at each call."""

    __slots__ = ("_multiply", "bias", "nbytes", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = weight.nbytes
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.bias = None if bias is None else bias.to(weight.dtype)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._multiply(x, self.weight, self.bias, "none", [], "")
        return result


class UnpackedMethod:
    """Weights dequantised to ``dtype`` ("none" as a quantisation), on the device that they are on.

    ``prepack`` for oneDNN, on the CPU only, where it is possible when not said.
    """

    def __init__(self, dtype: torch.dtype, *, prepack: bool | None = None) -> None:
        self.dtype = dtype
        self._prepack = can_prepack(dtype) if prepack is None else prepack

    def linear(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        dense = weight.dequantize(self.dtype)
        return PrepackedLinear(dense, bias) if self._prepack else PlainLinear(dense, bias)

    def gated(self, weight: StoredTensor, bias: Tensor | None) -> GatedLinear:
        # SiLU and product as oneDNN post-operations of two separate matrices were measured: 5 % faster at 512 rows,
        # 20 % slower at 8.
        return FusedGate(self.linear(weight, bias))

    def head(self, weight: StoredTensor) -> tuple[Linear, RowTable | None]:
        return self.linear(weight, None), None
