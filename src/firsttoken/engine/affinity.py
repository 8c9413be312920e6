"""Where the engine's thread runs."""

from __future__ import annotations

import os

from firsttoken.core.errors import ConfigError


def check_core(core: int) -> None:
    """Raise `ConfigError` unless this process may run on ``core``."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("engine_core is not supported on this system: leave it out")
    allowed = os.sched_getaffinity(0)
    if core not in allowed:
        raise ConfigError(f"engine_core must be a processor that may be used ({_ranges(allowed)}), got {core}")


def keep_to(core: int) -> None:
    """Keep the calling thread to ``core``, so that no step waits while the system moves it. Threads that exist stay
    where they are, later ones follow it."""
    os.sched_setaffinity(0, {core})


def _ranges(cores: set[int]) -> str:
    """``{0, 1, 2, 5}`` -> ``0-2, 5``."""
    words: list[str] = []
    for core in sorted(cores):
        if core - 1 in cores:
            words[-1] = f"{words[-1].partition('-')[0]}-{core}"
        else:
            words.append(str(core))
    return ", ".join(words)
