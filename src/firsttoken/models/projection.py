"""A linear layer on a GPU: its weights in full or packed, and what follows the product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.packed_linear.layout import PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """``weight`` bf16 ``[N, K]`` or packed, ``bias`` ``[N]`` bf16, and what follows the product."""

    kind: OpKind
    weight: Tensor | PackedWeight
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def matrix(self) -> Tensor:
        """The weights where they are bfloat16."""
        assert isinstance(self.weight, Tensor)
        return self.weight

    @property
    def packed(self) -> PackedWeight:
        """The weights where they are packed."""
        assert isinstance(self.weight, PackedWeight)
        return self.weight
