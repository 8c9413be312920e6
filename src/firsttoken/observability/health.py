"""Is the engine making progress? "busy" and "stuck" differ by whether steps still end.

| state | meaning |
|---|---|
| ``idle`` | no work, and the loop turns |
| ``busy`` | work, and a step ended (or the work began) less than ``stuck_after_s`` ago |
| ``stuck`` | work but no step ended for ``stuck_after_s``; or no heartbeat for as long: the loop does not turn |
| ``dead`` | the engine is gone, or ``stuck`` has lasted until ``dead_after_s`` |
| ``restarting`` | it was dead, and another one is being started |

A long step is not stuck until the limit has passed, counted from the later of the last step's end and the moment
the work began: an engine that idled for an hour is not stuck when a request arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.transport.messages import EngineStats

State = Literal["idle", "busy", "stuck", "dead", "restarting"]

STUCK_AFTER_S = 30.0
DEAD_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class Health:
    """One look at the engine. ``heartbeat_age_ms``: since the loop last turned; ``step_age_ms``: since a step last
    ended, None before the first one; ``restarts``: how many times another engine has taken a dead one's place."""

    state: State
    heartbeat_age_ms: float
    step_age_ms: float | None
    running: int
    waiting: int
    restarts: int = 0


class Progress:
    """Follows the engine from the moment it is ready (``now_ns``). Not thread-safe: it lives in the event loop."""

    def __init__(
        self, now_ns: int, *, stuck_after_s: float = STUCK_AFTER_S, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        if not 0 < stuck_after_s <= dead_after_s:
            raise ValueError(
                f"stuck_after_s must be more than 0 and at most dead_after_s, got {stuck_after_s} and {dead_after_s}"
            )
        self._stuck_after_ns = int(stuck_after_s * NS_PER_S)
        self._dead_after_ns = int(dead_after_s * NS_PER_S)
        self._stats = EngineStats(heartbeat_ns=now_ns)
        self._work_since: int | None = None
        self._gone = False

    def submitted(self, now_ns: int) -> None:
        """Work was sent to the engine."""
        if self._work_since is None:
            self._work_since = now_ns

    def update(self, stats: EngineStats) -> None:
        """Take over the engine's latest stats."""
        self._stats = stats
        if stats.running + stats.waiting == 0:
            # A heartbeat older than the submission says nothing about it.
            if self._work_since is not None and stats.heartbeat_ns >= self._work_since:
                self._work_since = None
        elif self._work_since is None:
            self._work_since = stats.heartbeat_ns

    def gone(self) -> None:
        """The engine's end of the channel closed, or it said that it cannot go on."""
        self._gone = True
        # What it held is gone with it.
        self._stats = msgspec.structs.replace(self._stats, running=0, waiting=0)

    def check(self, now_ns: int, *, restarting: bool = False, restarts: int = 0) -> Health:
        """The state at ``now_ns``. ``restarting``: another engine is being started."""
        stats = self._stats
        silent = max(now_ns - stats.heartbeat_ns, 0)
        return Health(
            state="restarting" if restarting else self._state(now_ns, silent),
            heartbeat_age_ms=silent / NS_PER_MS,
            step_age_ms=max(now_ns - stats.last_step_ns, 0) / NS_PER_MS if stats.last_step_ns else None,
            running=stats.running,
            waiting=stats.waiting,
            restarts=restarts,
        )

    def _state(self, now_ns: int, silent: int) -> State:
        if self._gone or silent > self._dead_after_ns:
            return "dead"
        if self._work_since is None:
            return "idle" if silent <= self._stuck_after_ns else "stuck"
        moved = max(self._stats.last_step_ns, self._work_since)
        still = now_ns - moved
        if still > self._dead_after_ns:
            return "dead"
        return "busy" if still <= self._stuck_after_ns else "stuck"
