"""What it would take to compute KV instead of restoring it."""

from __future__ import annotations

from typing import Protocol

# A restore that would take more than this part of computing is not worth what may come between.
WORTH = 0.8


class RecomputeCost(Protocol):
    """By the model of step times of the device."""

    def __call__(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from position ``start`` to before ``end`` of one prompt, with nothing beside
        it."""
