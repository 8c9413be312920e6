"""Weights kept in the fewest bytes for few rows, and in bfloat16 for many."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.quantization.int4 import Int4Linear, packed_as_stored
from firsttoken.quantization.int8 import Int8Linear, kernel_takes, pack_int8
from firsttoken.quantization.linear import ByRows, FusedGate, GatedLinear, Linear
from firsttoken.quantization.on_load import rounded
from firsttoken.quantization.row_table import RowTable
from firsttoken.quantization.stored import StoredTensor, floats
from firsttoken.quantization.unpacked import UnpackedMethod

# Up to here the 4-bit product, which is bound by reading weights, beats the bfloat16 one: 11.5 against 14.0 ms for all
# layers of the default model at 8 rows, 16.8 against 15.7 at 12 (two Zen 4 cores).
INT4_ROWS = 8
# Of the head, half of what a step of one request reads. Its coarse logits may be rounded so: the likeliest tokens get
# exact ones. 5.5 against 12.8 ms at a row of the default model's, 6.3 against 7.1 at 4, 12.6 against 6.6 at 8 (one core
# of a Sapphire Rapids).
HEAD_ROWS = 4


class PackedMethod:
    """Weights that the file holds in 4 bits so for up to `INT4_ROWS` rows, and prepacked bfloat16 above; others in
    bfloat16 only, and the head in int8 for up to `HEAD_ROWS`.

    Keeps both forms, since prefill is bound by arithmetic and decode by bytes. Deterministic for a given number of
    rows; the two forms differ by bfloat16 rounding of weights.
    """

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._unpacked = UnpackedMethod(torch.bfloat16)

    def linear(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        many = self._unpacked.linear(weight, bias)
        packed = packed_as_stored(weight)
        return many if packed is None else ByRows(Int4Linear(packed, bias), many, INT4_ROWS)

    def gated(self, weight: StoredTensor, bias: Tensor | None) -> GatedLinear:
        return FusedGate(self.linear(weight, bias))

    def head(self, weight: StoredTensor) -> tuple[Linear, RowTable | None]:
        many = self.linear(weight, None)
        few = pack_int8(rounded(floats(weight), "int8", weight.name))
        return ByRows(Int8Linear(few, None), many, HEAD_ROWS) if kernel_takes(few) else many, None
