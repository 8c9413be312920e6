"""Weights of four or eight bits on the CPU, in one copy that few and many rows share."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import Tensor

from firsttoken.quantization.int4 import (
    Int4Linear,
    Int4Weight,
    WidenedInt4,
    layout_is_known,
    pack_rounded,
    packed_as_stored,
)
from firsttoken.quantization.int8 import Int8Linear, WidenedInt8, fits_int8, kernel_takes, pack_int8
from firsttoken.quantization.linear import ByRows, FusedGate, GatedLinear, Linear
from firsttoken.quantization.on_load import rounded
from firsttoken.quantization.rounded import RoundedWeight
from firsttoken.quantization.row_table import RowTable
from firsttoken.quantization.scratch import Scratch
from firsttoken.quantization.stored import StoredTensor, floats
from firsttoken.quantization.unpacked import UnpackedMethod

# Up to here torch's own products beat writing weights out: 1.3 ns a weight against 2.2 at 32 rows of int4, and 2.6
# against 2.6 at 64; 0.72 against 0.76 at 16 rows of int8, and 1.4 against 0.93 at 32 (one core of a Sapphire Rapids,
# `python -m benchmarks.cpu_linear`).
INT4_ROWS = 48
INT8_ROWS = 16


class RoundedMethod:
    """Linears in int4 or int8, rounded while they are loaded, the head in int8. int4 keeps the four bits of GGUF blocks
    as they are.

    ``as_stored``: for a file that is quantised already, whose linears are as it holds them: int4 in groups, int8 with a
    scale a row, and all others in bfloat16. Deterministic for a given number of rows; the forms for few and for many
    differ by bfloat16 rounding.
    """

    dtype = torch.bfloat16

    def __init__(self, format: Literal["int4", "int8"], *, as_stored: bool = False) -> None:
        self._format = format
        self._unpacked = UnpackedMethod(self.dtype) if as_stored else None
        self._scratch = Scratch()
        self._int4_rows = INT4_ROWS if layout_is_known() else sys.maxsize

    def linear(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        kept = weight.rounded
        if kept is not None and fits_int8(kept):
            return self._int8(kept.map_rows(Tensor.clone), bias)
        four = packed_as_stored(weight) if kept is not None or self._format == "int4" else None
        if four is not None:
            return self._int4(four, bias)
        if self._unpacked is not None:
            return self._unpacked.linear(weight, bias)
        made = rounded(floats(weight), self._format, weight.name)
        return self._int4(pack_rounded(made), bias) if self._format == "int4" else self._int8(made, bias)

    def gated(self, weight: StoredTensor, bias: Tensor | None) -> GatedLinear:
        return FusedGate(self.linear(weight, bias))

    def head(self, weight: StoredTensor) -> tuple[Linear, RowTable | None]:
        if self._unpacked is not None:
            return self.linear(weight, None), None
        made = rounded(floats(weight), "int8", weight.name)
        return self._int8(made, None), RowTable(StoredTensor.of_rounded(weight.name, made), self.dtype, copy=False)

    def _int4(self, weight: Int4Weight, bias: Tensor | None) -> Linear:
        return ByRows(Int4Linear(weight, bias), WidenedInt4(weight, bias, self._scratch), self._int4_rows)

    def _int8(self, weight: RoundedWeight, bias: Tensor | None) -> Linear:
        packed = pack_int8(weight)
        if not kernel_takes(packed):
            return WidenedInt8(packed, bias, self._scratch, alone=True)
        return ByRows(Int8Linear(packed, bias), WidenedInt8(packed, bias, self._scratch), INT8_ROWS)
