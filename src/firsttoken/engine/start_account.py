"""Where the time of an engine's start went."""

from __future__ import annotations

from firsttoken.core.clock import NS_PER_MS, now_ns


class StartAccount:
    """Milliseconds of each part of the start, in order; the parts sum to the whole since ``began_ns``."""

    def __init__(self, began_ns: int | None = None) -> None:
        self._last = now_ns() if began_ns is None else began_ns
        self.parts: dict[str, float] = {}

    def close(self, part: str) -> None:
        """Everything since the last call belongs to ``part``."""
        now = now_ns()
        self.parts[part] = self.parts.get(part, 0.0) + (now - self._last) / NS_PER_MS
        self._last = now
