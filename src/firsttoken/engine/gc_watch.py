"""Records how long the garbage collector stopped the loop, so that a slow step can be told from a collection."""

from __future__ import annotations

import gc
from typing import Literal

from firsttoken.core.clock import now_ns


class GCWatch:
    """Sums collection pauses between two calls of `take_ns`."""

    def __init__(self) -> None:
        self._began = 0
        self._total = 0
        gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._began = now_ns()
        elif self._began:
            self._total += now_ns() - self._began
            self._began = 0

    def take_ns(self) -> int:
        """Nanoseconds of collection since the last call."""
        total, self._total = self._total, 0
        return total

    def close(self) -> None:
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)
