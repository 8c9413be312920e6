"""Weights of four or eight bits on the CPU, in one copy that few and many rows share."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import Tensor

from firsttoken.quantization.int4 import Int4Linear, WidenedInt4, layout_is_known, pack_rounded, packed_as_stored
from firsttoken.quantization.int8 import Int8Linear, WidenedInt8, fits_int8, kernel_takes, pack_int8
from firsttoken.quantization.linear import ByRows, FusedGate, GatedLinear, Linear
from firsttoken.quantization.on_load import rounded
from firsttoken.quantization.scratch import Scratch
from firsttoken.quantization.stored import FLOAT_TYPES, StoredTensor

# Up to here torch's own products beat writing weights out: 1.07 ns a weight against 1.5 at 32 rows of int4, 2.1 at 64,
# and 0.30 against 0.55 at 8 rows of int8, 0.6 at 16 (one core of a Sapphire Rapids; `benchmarks/cpu_linear.py`).
INT4_ROWS = 40
INT8_ROWS = 12


class RoundedMethod:
    """Linears in int4 or int8, rounded while they are loaded; what a file holds in that format already is kept as it
    is, 4-bit GGUF blocks too. The head is int8 in either case.

    Deterministic for a given number of rows; the two forms differ by bfloat16 rounding.
    """

    dtype = torch.bfloat16

    def __init__(self, format: Literal["int4", "int8"]) -> None:
        self._format = format
        self._scratch = Scratch()
        self._int4_rows = INT4_ROWS if layout_is_known() else sys.maxsize

    def linear(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        if self._format == "int8":
            return self._int8(weight, bias)
        packed = packed_as_stored(weight)
        if packed is None:
            packed = pack_rounded(rounded(_floats(weight), "int4", weight.name))
        return ByRows(Int4Linear(packed, bias), WidenedInt4(packed, bias, self._scratch), self._int4_rows)

    def gated(self, weight: StoredTensor, bias: Tensor | None) -> GatedLinear:
        return FusedGate(self.linear(weight, bias))

    def head(self, weight: StoredTensor) -> Linear:
        return self._int8(weight, None)

    def _int8(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        kept = weight.rounded
        if kept is None or not fits_int8(kept):
            kept = rounded(_floats(weight), "int8", weight.name)
        packed = pack_int8(kept)
        if not kernel_takes(packed):
            return WidenedInt8(packed, bias, self._scratch, alone=True)
        return ByRows(Int8Linear(packed, bias), WidenedInt8(packed, bias, self._scratch), INT8_ROWS)


def _floats(weight: StoredTensor) -> Tensor:
    """In the file's own precision, without a copy where it has one."""
    if weight.type in FLOAT_TYPES:
        return weight.data
    return weight.dequantize(torch.float32)
