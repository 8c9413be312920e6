"""What it would take to compute KV instead of restoring it."""

from __future__ import annotations

from typing import Protocol

# The delay that is expected of a restore takes over so much of each that was seen, and loses so much with each that it
# prevents: what has passed is not held against restores for ever.
_LEARN, _FORGET = 1 / 8, 1 / 16
# A restore that would take more than this part of computing is not worth what may come between.
WORTH = 0.8


class RecomputeCost(Protocol):
    """By the model of step times of the device."""

    def __call__(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from position ``start`` to before ``end`` of one prompt, with nothing beside
        it."""


class RestoreCost:
    """Whether to restore is sooner than to compute. What copies and reads take is measured elsewhere; learned here is
    what comes on top, of steps in flight and of looking: seconds a restore, whatever its size."""

    def __init__(self, recompute: RecomputeCost) -> None:
        self._recompute = recompute
        self.delay_s = 0.0

    def is_worth(self, seconds: float, start: int, end: int) -> bool:
        """Of tokens ``start`` to before ``end``, where copies and reads would take so many seconds."""
        limit = WORTH * self._recompute(start, end)
        if seconds + self.delay_s < limit:
            return True
        if seconds < limit:
            self.delay_s -= _FORGET * self.delay_s
        return False

    def computing_s(self, start: int, end: int) -> float:
        return self._recompute(start, end)

    def took(self, predicted_s: float, seconds: float) -> None:
        """A restore of which copies and reads should have taken ``predicted_s``."""
        self.delay_s += _LEARN * (max(seconds - predicted_s, 0.0) - self.delay_s)
