"""When an engine that has died is started again, and when no more."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from firsttoken.core.clock import NS_PER_S
from firsttoken.observability.health import DEAD_AFTER_S


@dataclass(frozen=True)
class RestartPolicy:
    """At most ``limit`` restarts within ``within_s`` seconds, 0 for none at all. The first goes at once; the next after
    ``pause_s`` seconds, each further after twice the pause: what failed twice in a row may need time, as a device whose
    memory others hold.

    An engine that is there and of which nothing was heard, or whose steps did not end, for ``hung_after_s`` counts as
    dead. Raises ValueError for values that make no sense.
    """

    limit: int = 0
    within_s: float = 300.0
    pause_s: float = 1.0
    hung_after_s: float = DEAD_AFTER_S

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"the number of restarts must be 0 or more, got {self.limit}")
        for name in ("within_s", "pause_s", "hung_after_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0, got {value}")


class Restarts:
    """The attempts so far. Times are ns of `core.clock`."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._attempts: deque[int] = deque()

    def pause_s(self, now_ns: int) -> float | None:
        """How long an engine that died now would have to wait; None when there were too many."""
        since = now_ns - int(self.policy.within_s * NS_PER_S)
        while self._attempts and self._attempts[0] <= since:
            self._attempts.popleft()
        count = len(self._attempts)
        if count >= self.policy.limit:
            return None
        return self.policy.pause_s * 2 ** (count - 1) if count else 0.0

    def begin(self, now_ns: int) -> None:
        """An attempt is made, whether it will succeed or not."""
        self._attempts.append(now_ns)
