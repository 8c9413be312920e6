"""What a step costs the host: CPU time of the loop's thread."""

from __future__ import annotations

from time import thread_time_ns

from firsttoken.core.clock import now_ns


class HostClock:
    """Sums the CPU time of one thread while it runs; `pause` and `resume` are called by that thread, in turn.

    Waiting for a step's result is paused: some devices are waited for by looking again and again, which is no work.
    """

    __slots__ = ("_asked_ns", "_since", "_told", "_total")

    def __init__(self) -> None:
        self._since: int | None = None
        self._total = 0
        self._asked_ns: int | None = None
        self._told = 0

    def resume(self) -> None:
        self._since = thread_time_ns()

    def pause(self) -> None:
        if self._since is not None:
            self._total += thread_time_ns() - self._since
            self._since = None

    @property
    def total_ns(self) -> int:
        """As of the last `pause`."""
        return self._total

    def share(self) -> float:
        """Of the time since the last call, what was used (0 to 1); 0 at the first."""
        now, total = now_ns(), self._total
        passed = 0 if self._asked_ns is None else now - self._asked_ns
        used = total - self._told
        self._asked_ns, self._told = now, total
        return used / passed if passed > 0 else 0.0
