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


class LazyConstraint(Constraint, Protocol):
    """One whose mask is made when it is asked for."""

    def prepare(self) -> None:
        """Make the next mask now, when nobody waits for it. Raises nothing: what fails does so when it is asked for."""
        ...


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """The mask's bit of ``token``."""
    return bool(mask[token >> 5] >> (token & 31) & 1)


class Masker:
    """Applies masks to rows of ``vocab_size`` logits, in memory of its own: to ask the system for a row's anew takes as
    long as the work."""

    def __init__(self, vocab_size: int) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._of_byte = np.where(bits == 1, np.float32(0), np.float32(-np.inf))  # what eight tokens' logits get added
        self._added = np.empty((4 * -(-vocab_size // 32), 8), dtype=np.float32)
        self._row = self._added.reshape(-1)[:vocab_size]

    def apply(self, mask: NDArray[np.int32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """``logits`` (float32 [V], no +inf, no NaN) where the mask allows them, -inf elsewhere; until the next call."""
        np.take(self._of_byte, mask.view(np.uint8), axis=0, out=self._added, mode="clip")
        return np.add(self._row, logits, out=self._row)
