"""A weight as the checkpoint stores it, on its way to a linear method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firsttoken.checkpoint.dequantize import dequantize as numpy_dequantize
from firsttoken.core.errors import CheckpointError
from firsttoken.quantization import gguf_torch
from firsttoken.quantization.rounded import RoundedWeight, stack

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Rows dequantised at once: keeps float32 temporaries of a large matrix (an embedding) near the cache.
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """``data`` is a float tensor of ``shape`` for a type in `FLOAT_TYPES`, else uint8
    ``[rows, row_bytes]`` blocks (one row for a vector). ``rounded`` has values and scales apart, and
    ``data`` is its values."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: Tensor
    rounded: RoundedWeight | None = None

    @classmethod
    def from_bytes(cls, name: str, type: str, shape: tuple[int, ...], raw: Tensor) -> StoredTensor:
        """``raw`` uint8: the stored bytes, rows in order."""
        dtype = FLOAT_TYPES.get(type)
        if dtype is None:
            return cls(name, type, shape, raw.reshape(shape[0] if len(shape) == 2 else 1, -1))
        # A file may place a tensor at any byte; the view needs alignment.
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return cls(name, type, shape, raw.reshape(-1).view(dtype).view(shape))

    @classmethod
    def dense(cls, name: str, data: Tensor) -> StoredTensor:
        """Wrap a float tensor that was made rather than read."""
        names = {dtype: type for type, dtype in FLOAT_TYPES.items()}
        return cls(name, names[data.dtype], tuple(data.shape), data)

    @classmethod
    def of_rounded(cls, name: str, weight: RoundedWeight) -> StoredTensor:
        return cls(name, weight.format.upper(), weight.shape, weight.values, weight)

    @property
    def is_four_bit(self) -> bool:
        return self.type in gguf_torch.FOUR_BIT_TYPES

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if self.rounded is None else self.rounded.nbytes

    def map_rows(self, order: Callable[[Tensor], Tensor]) -> StoredTensor:
        """The same tensor with its rows rearranged by ``order``, which may do nothing else."""
        if self.rounded is not None:
            return StoredTensor.of_rounded(self.name, self.rounded.map_rows(order))
        return replace(self, data=order(self.data))

    def check_finite(self) -> None:
        """Raise `CheckpointError` if a float, or the scale of a block in `gguf_torch.TYPES` or of what is rounded, is
        NaN or infinite.

        Other block types are checked when they are dequantised.
        """
        if self.rounded is not None:
            numbers = self.rounded.check_sum()
        elif self.type in gguf_torch.TYPES:
            numbers = gguf_torch.block_numbers(self.data, self.type)
        elif self.type in FLOAT_TYPES:
            numbers = self.data
        else:
            return
        # A sum is one pass, and finite numbers cannot reach its limit in float32 unless they are absurd anyway.
        self._refuse_unless_finite(numbers)

    def _refuse_unless_finite(self, numbers: Tensor) -> None:
        if not bool(torch.isfinite(numbers.sum(dtype=torch.float32))):
            raise CheckpointError("holds NaN or infinite numbers: the file is damaged, get it again", field=self.name)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """A new tensor of ``shape`` in ``dtype`` that shares no memory with the file."""
        if self.rounded is not None:
            return self._in_pieces(lambda rows: self._rounded_rows(rows, dtype), dtype)
        if self.type in FLOAT_TYPES:
            return self.data.to(dtype, copy=True)
        if len(self.shape) == 1:
            return self._dequantize_rows(self.data, dtype).view(self.shape)
        return self._in_pieces(lambda rows: self._dequantize_rows(self.data[rows], dtype), dtype)

    def _in_pieces(self, dequantize: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape
        step = max(1, _PIECE_ELEMENTS // columns)
        if rows <= step:
            return dequantize(slice(None))
        out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        for first in range(0, rows, step):
            piece = slice(first, first + step)
            out[piece] = dequantize(piece)
        return out

    def _rounded_rows(self, rows: slice, dtype: torch.dtype) -> Tensor:
        assert self.rounded is not None
        return self.rounded.map_rows(lambda part: part[rows]).dequantized().to(dtype)

    def _dequantize_rows(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        if self.type in gguf_torch.TYPES:
            return gguf_torch.dequantize(data, self.type, dtype)
        shape = (data.shape[0], self.shape[-1])
        values = torch.from_numpy(numpy_dequantize(data.numpy(), self.type, shape))
        self._refuse_unless_finite(values)
        return values.to(dtype)


def floats(weight: StoredTensor) -> Tensor:
    """The numbers in the file's own precision where it has one, without a copy; else in float32."""
    return weight.data if weight.type in FLOAT_TYPES else weight.dequantize(torch.float32)


def concatenate(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Stack matrices by rows. Parts of one kind stay as they are; a mixture becomes float32."""
    if len(parts) == 1:
        return parts[0]
    name = " + ".join(part.name for part in parts)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    rounded = [part.rounded for part in parts if part.rounded is not None]
    if len(rounded) == len(parts) and (both := stack(rounded)) is not None:
        return StoredTensor.of_rounded(name, both)
    if not rounded and len({part.type for part in parts}) == 1:
        return StoredTensor(name, parts[0].type, shape, torch.cat([part.data for part in parts]))
    return StoredTensor(name, "F32", shape, torch.cat([part.dequantize(torch.float32) for part in parts]))
