"""The registry of linear methods by the name that ``--quantization`` takes."""

from __future__ import annotations

import torch

from firsttoken.core.errors import ConfigError
from firsttoken.quantization.linear import LinearMethod
from firsttoken.quantization.packed import PackedMethod
from firsttoken.quantization.rounded_method import RoundedMethod
from firsttoken.quantization.unpacked import UnpackedMethod

QUANTIZATIONS = ("none", "packed", "int8", "int4")


def linear_method(quantization: str, dtype: torch.dtype, *, as_stored: bool = False) -> LinearMethod:
    """The method of that name computing in ``dtype``; ``as_stored`` for a file whose linears are rounded already.

    Raises `ConfigError` for a name or pair that does not exist.
    """
    if quantization == "none":
        return UnpackedMethod(dtype)
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"unknown quantization {quantization!r}: choose one of {', '.join(QUANTIZATIONS)}")
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"quantization {quantization!r} computes in bfloat16, not {dtype}: leave dtype out or use 'none'"
        )
    if quantization == "packed":
        return PackedMethod()
    return RoundedMethod("int4" if quantization == "int4" else "int8", as_stored=as_stored)
