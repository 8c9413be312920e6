"""Weights that a file holds as rounded numbers, laid out for a GPU's kernels without rounding them again."""

from __future__ import annotations

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.packed_linear.config import int4_group
from firsttoken.kernels.packed_linear.layout import PackedWeight, empty_packed, pack_fp8, pack_int4
from firsttoken.quantization.rounded import RoundedFormat, RoundedWeight

# What those kernels read. Eight-bit integers are multiplied in bfloat16.
PACKED_FORMATS: frozenset[RoundedFormat] = frozenset({"int4", "fp8"})


def packed(weight: RoundedWeight, name: str) -> PackedWeight:
    """The same values and zero points; a scale that more than 128 columns share is repeated, and int4's are rounded to
    bfloat16. Raises `ConfigError` with ``name`` for a size that the kernels do not take."""
    n, k = weight.shape
    if weight.format == "fp8":
        if k % 16:
            raise ConfigError(
                f"{name} is {n} x {k}: FP8 weights need a multiple of 16 columns; use --quantization none"
            )
        if weight.values.is_meta:
            return empty_packed("fp8", n, k, 0, weight.values.device)
        return pack_fp8(weight.values.contiguous(), weight.scales)
    group = int4_group(weight.group or k)
    if weight.format != "int4" or group == 0:
        raise ConfigError(
            f"{name} is {n} x {k} in {weight.format} with a scale for {weight.group or k} columns, which no kernel "
            "takes; use --quantization none"
        )
    if weight.values.is_meta:
        return empty_packed("int4", n, k, group, weight.values.device, zeros=weight.zeros is not None)
    weight = weight.in_groups(group)
    return pack_int4(weight.values, weight.scales, weight.zeros)
