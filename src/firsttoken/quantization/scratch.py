"""Room for weights that are written out in bfloat16 for one product."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements that are written out at a time: the piece is read again before it leaves the cache. Of 2^18 to 2^22 the
# fastest at 512 rows, by a few per cent (28,672 x 4,096 on one core of a Sapphire Rapids).
PIECE = 1 << 21


class Scratch:
    """Buffers that all linears of a model share: one product is computed at a time, by one thread."""

    __slots__ = ("_bytes", "_wide")

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.int8)
        self._wide = torch.empty(0, dtype=torch.bfloat16)

    def reserve(self, elements: int) -> None:
        """Room for so many elements, and half as many bytes twice. What `bytes` and `wide` gave before is as it was."""
        if elements > len(self._wide):
            self._bytes = torch.empty(elements, dtype=torch.int8)
            self._wide = torch.empty(elements, dtype=torch.bfloat16)

    def bytes(self, count: int) -> tuple[Tensor, Tensor]:
        """Two buffers of ``count`` int8, without contents."""
        return self._bytes[:count], self._bytes[count : 2 * count]

    def wide(self, count: int) -> Tensor:
        """``count`` bfloat16, without contents."""
        return self._wide[:count]
