"""What a sampler asks of that which limits a row's tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# A token that was refused is struck out and another chosen; after so many the row takes its way out.
MOST_REFUSALS = 3


class Constraint(Protocol):
    """Of one row: `mask`, then `take` with a token that it allows, until one is taken. All raise `ConstraintFailed`
    where the row cannot go on."""

    def mask(self) -> NDArray[np.int32]:
        """Which tokens may be chosen, a bit each (int32 [ceil(V / 32)], the lowest bit first)."""
        ...

    def take(self, token: int) -> bool:
        """The row goes on with ``token``; False when it must not, and another is to be taken."""
        ...

    def take_way_out(self) -> int:
        """Take a token that leads to the row's end, and tell which."""
        ...

    @property
    def may_refuse(self) -> bool:
        """Whether `take` could return False for a token that the present mask allows."""
        ...


def allowed(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """The mask's bits, bool [V]."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
