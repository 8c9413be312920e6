"""A quantized linear's tensors as a `RoundedWeight`, on whatever device they are.

GPTQ and AWQ hold a matrix ``[K, N]``, as it is multiplied from the right, unsigned values in int32 words and a zero
point for each group, ``qzeros`` ``[K / group, N]`` in words of neighbouring rows of W. GPTQ's ``qweight`` has words of
neighbouring columns; AWQ's of eight neighbouring rows, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Bytes, TensorInfo, TensorSource
from firsttoken.checkpoint.quantized.scheme import LinearScheme
from firsttoken.checkpoint.quantized.tensors import QuantizedTensors
from firsttoken.core.errors import CheckpointError
from firsttoken.quantization.compressed import BITS, read_linear, unpack_words
from firsttoken.quantization.rounded import RoundedWeight

_DTYPES = {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
# The place in AWQ's words of each of eight rows.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def rounded_weight(source: TensorSource, info: TensorInfo, place: Callable[[Bytes], Tensor]) -> RoundedWeight:
    """The rounded weight ``info`` of a checkpoint; ``place`` brings stored bytes to where they are wanted, as uint8.
    Raises `CheckpointError`; whether numbers are finite is the weight's own ``check_sum``."""
    assert info.rounded is not None
    assert isinstance(source, QuantizedTensors)
    tensors = {part: _typed(place(raw), found) for part, (found, raw) in source.parts(info.name).items()}
    n, k = info.shape
    return read_rounded(info.name, info.rounded, (n, k), tensors)


def _typed(raw: Tensor, info: TensorInfo) -> Tensor:
    dtype = _DTYPES[info.type]
    # A file may place a tensor at any byte; the view needs alignment.
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.reshape(-1).view(dtype).view(tuple(info.shape))


def read_rounded(
    name: str, scheme: LinearScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor]
) -> RoundedWeight:
    """The weights ``name`` of ``shape`` ``[N, K]`` from the linear's ``tensors`` (`QuantizedTensors.parts`), in the
    order of rows and columns that the file has. Raises `CheckpointError` where they do not fit."""
    try:
        if scheme.layout == "awq":
            weight = _awq(scheme, shape, tensors)
        elif scheme.layout in ("gptq", "gptq_v2"):
            weight = _gptq(scheme, shape, tensors)
        else:
            weight = _compressed(name, scheme, shape, tensors)
    except ValueError as error:
        raise CheckpointError(f"cannot be put together: {error}", field=name) from error
    return weight


def _compressed(
    name: str, scheme: LinearScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor]
) -> RoundedWeight:
    if not scheme.zeros:
        tensors = {part: tensor for part, tensor in tensors.items() if part != "weight_zero_point"}
    weight = read_linear(tensors, scheme.format, shape)
    if scheme.layout == "plain" and scheme.format == "int4":
        for part in (weight.values, weight.zeros):
            if part is not None and not bool(((part >= -8) & (part <= 7)).all()):
                raise CheckpointError("holds values beyond the -8 to 7 of four bits", field=name)
    return weight


def _gptq(scheme: LinearScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> RoundedWeight:
    bits = BITS[scheme.format]
    n, k = shape
    values = unpack_words(tensors["qweight"].t(), bits, k)
    # Stored less one at first, which has been seen to be no more than the largest value.
    first = 1 if scheme.layout == "gptq" else 0
    zeros = unpack_words(tensors["qzeros"], bits, n).t() + first
    return _transposed(scheme, values, tensors["scales"], zeros)


def _awq(scheme: LinearScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> RoundedWeight:
    n = shape[0]
    values, zeros = (_in_order(unpack_words(tensors[part], 4, n)).t() for part in ("qweight", "qzeros"))
    return _transposed(scheme, values, tensors["scales"], zeros)


def _in_order(rows: Tensor) -> Tensor:
    """``[.., 8 n]`` with each eight in the order that they are meant."""
    places = torch.tensor(_AWQ_PLACES, device=rows.device)
    return rows.view(len(rows), -1, 8).index_select(2, places).view(rows.shape)


def _transposed(scheme: LinearScheme, values: Tensor, scales: Tensor, zeros: Tensor) -> RoundedWeight:
    """``scales`` as stored, ``[K / group, N]``."""
    turned, points = scales.t().contiguous(), zeros.contiguous()
    if not scheme.group:
        turned, points = turned.flatten(), points.flatten()
    return RoundedWeight(scheme.format, values.contiguous(), turned, scheme.group, points if scheme.zeros else None)
