"""The tensors that a linear has in the `compressed-tensors` layout, both ways.

``pack-quantized`` holds integers of four or eight bits in int32 words, the first in the lowest bits, each plus half of
its range: ``weight_packed`` ``[N, K * bits / 32]``, ``weight_scale`` ``[N, K / group]`` or ``[N, 1]``, ``weight_shape``
int64 ``[N, K]`` and, where there are zero points, ``weight_zero_point``, of which a word holds neighbouring rows:
``[N * bits / 32, K / group]``. ``float-quantized`` and ``int-quantized`` hold ``weight`` as it is, float8_e4m3fn or
int8, with ``weight_scale`` ``[N, 1]``, or one for all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firsttoken.quantization.rounded import RoundedFormat, RoundedWeight

WORD_BITS = 32
BITS: dict[RoundedFormat, int] = {"int4": 4, "int8": 8}


def pack_words(values: Tensor, bits: int) -> Tensor:
    """``values`` int8 ``[R, C]`` of ``bits`` (4 or 8) signed bits each -> int32 ``[R, C * bits / 32]``, rounded up; the
    rest of the last word is 0."""
    rows, columns = values.shape
    each = WORD_BITS // bits
    words = torch.zeros(rows, -(-columns // each) * each, dtype=torch.int32, device=values.device)
    words[:, :columns] = values.to(torch.int32) + (1 << (bits - 1))
    words = words.view(rows, -1, each)
    # Parts of a word share no bits, so their sum is the word, in whatever order the carry into the sign is taken.
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=values.device)
    return (words << shifts).sum(-1, dtype=torch.int32)


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse: int32 ``[R, C * bits / 32]`` -> int8 ``[R, columns]``."""
    # A word's bytes lie in memory with the lowest first, and no value reaches over two.
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(1)
    return (parts[:, :columns] - (1 << (bits - 1))).view(torch.int8)


def write_linear(weight: RoundedWeight) -> dict[str, Tensor]:
    """The tensors of one linear by their names behind the linear's own: ``pack-quantized`` for integers,
    ``float-quantized`` for FP8."""
    scales = weight.scales.view(len(weight.scales), -1).contiguous()
    if weight.format == "fp8":
        return {"weight": weight.values.contiguous(), "weight_scale": scales}
    bits = BITS[weight.format]
    tensors = {
        "weight_packed": pack_words(weight.values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if weight.zeros is not None:
        zeros = weight.zeros.view(len(weight.zeros), -1)
        tensors["weight_zero_point"] = pack_words(zeros.t(), bits).t().contiguous()
    return tensors


def read_linear(tensors: Mapping[str, Tensor], format: RoundedFormat, shape: tuple[int, int]) -> RoundedWeight:
    """The weights of a linear of ``shape`` ``[N, K]`` from its tensors, on their device. Raises ValueError where they
    do not fit each other."""
    n, k = shape
    scales = tensors["weight_scale"]
    groups = scales.shape[-1] if scales.dim() == 2 else 1
    zeros = tensors.get("weight_zero_point")
    if "weight_packed" in tensors:
        bits = BITS[format]
        values = unpack_words(tensors["weight_packed"], bits, k)
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack_words(zeros.t(), bits, n).t()
    else:
        values = tensors["weight"]
    if groups == 1:
        # One for all is one for each row.
        scales, zeros = scales.reshape(-1).expand(n), None if zeros is None else zeros.reshape(-1).expand(n)
        group = 0
    else:
        group = k // groups
    return RoundedWeight(
        format, values, scales.contiguous(), group, None if zeros is None else zeros.to(torch.int8).contiguous()
    )
