"""What the models see of a projection: a callable, and the method that builds it from stored weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.kernels.silu_mul import silu_mul
from firsttoken.quantization.row_table import RowTable
from firsttoken.quantization.stored import StoredTensor


class Linear(Protocol):
    """``x [M, K] -> x W^T + b [M, N]``, in and out in the method's dtype. Each row's result is its own."""

    @property
    def nbytes(self) -> int:
        """Bytes that the kept weights take."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedLinear(Protocol):
    """``x [M, K] -> act(x Wg^T + bg) * (x Wu^T + bu) [M, N]``; ``act`` is SiLU unless the builder says otherwise."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class LinearMethod(Protocol):
    """Builds projections. ``dtype`` is what they take and give."""

    @property
    def dtype(self) -> torch.dtype: ...

    def linear(self, weight: StoredTensor, bias: Tensor | None) -> Linear:
        """``weight [N, K]``; ``bias [N]`` in any float dtype."""
        ...

    def gated(self, weight: StoredTensor, bias: Tensor | None) -> GatedLinear:
        """``weight [2 N, K]`` and ``bias [2 N]`` with the gate's rows first; the gate is SiLU."""
        ...

    def head(self, weight: StoredTensor) -> tuple[Linear, RowTable | None]:
        """``weight [vocab, K]`` of the head, and its rows where they lie in the same memory."""
        ...


class FusedGate:
    """A `GatedLinear` of one projection for both halves. ``multiply [M, 2 N] -> [M, N]`` applies the gate."""

    __slots__ = ("linear", "multiply")

    def __init__(self, linear: Linear, multiply: Callable[[Tensor], Tensor] = silu_mul) -> None:
        self.linear = linear
        self.multiply = multiply

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(self.linear(x))


class ByRows:
    """Two forms of the same projection: ``few`` up to ``limit`` rows, ``many`` above."""

    __slots__ = ("few", "limit", "many")

    def __init__(self, few: Linear, many: Linear, limit: int) -> None:
        self.few = few
        self.many = many
        self.limit = limit

    @property
    def nbytes(self) -> int:
        return self.few.nbytes + self.many.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if x.shape[0] <= self.limit else self.many(x)
