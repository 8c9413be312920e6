"""From token ids to the residual stream."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from firsttoken.kernels.layer_norm import LayerNorm
from firsttoken.quantization.row_table import RowTable


class Embedding(Protocol):
    """`RowTable` is one. ``rows`` gives memory of its own: the layers write to it."""

    @property
    def nbytes(self) -> int: ...

    def rows(self, indices: Tensor) -> Tensor:
        """``indices`` int64 ``[T]`` -> ``[T, H]`` float32."""
        ...


class ScaledEmbedding:
    """Each row times one number."""

    __slots__ = ("scale", "table")

    def __init__(self, table: RowTable, scale: float) -> None:
        self.table = table
        self.scale = scale

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        return self.table.rows(indices).mul_(self.scale)


class NormedEmbedding:
    """Each row through a layer norm that gives float32."""

    __slots__ = ("norm", "table")

    def __init__(self, table: RowTable, norm: LayerNorm) -> None:
        self.table = table
        self.norm = norm

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        return self.norm(self.table.rows(indices))
