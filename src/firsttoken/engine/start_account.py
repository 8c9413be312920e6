"""Where the time of an engine's start went."""

from __future__ import annotations

import os
import time

from firsttoken.core.clock import NS_PER_MS, NS_PER_S, now_ns


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


def process_began_ns() -> int:
    """When this process was started, on the one clock; now, where the system does not tell.

    The kernel counts in ticks, 10 ms as a rule.
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The second field, the program's name in brackets, may hold anything.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age_s = 0.0
    return now_ns() - int(max(age_s, 0.0) * NS_PER_S)
