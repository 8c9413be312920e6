"""Rows of a stored matrix by index: the embedding, and exact weights for a few of the head's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.quantization import gguf_torch
from firsttoken.quantization.stored import FLOAT_TYPES, StoredTensor


class RowTable:
    """Keeps a matrix as stored where its rows can be taken apart in torch, so that it costs no second copy.

    Other block types are dequantised to ``dtype`` once. The table owns its memory: a lookup never waits for the disk.
    """

    __slots__ = ("_stored",)

    def __init__(self, stored: StoredTensor, dtype: torch.dtype, *, copy: bool = True) -> None:
        """``copy`` may be left out where ``stored`` is no view of a file."""
        if not copy:
            self._stored = stored
        elif stored.rounded is not None or stored.type in FLOAT_TYPES or stored.type in gguf_torch.TYPES:
            self._stored = stored.map_rows(Tensor.clone)
        else:
            self._stored = StoredTensor.dense(stored.name, stored.dequantize(dtype))

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        """``indices`` int64 ``[n]`` -> ``[n, K]`` float32, exactly the stored values."""
        if self._stored.rounded is not None:
            return self._stored.rounded.map_rows(lambda part: part.index_select(0, indices)).dequantized()
        picked = self._stored.data.index_select(0, indices)
        if self._stored.type in FLOAT_TYPES:
            # float() gives a float32 table's own new rows back: they may be written to.
            return picked.float()
        return gguf_torch.dequantize(picked, self._stored.type, torch.float32)
