"""How many threads a CPU step should use: as many as there are cores that other programs leave.

A step of a small model has about a thousand parallel regions, and at the end of each the threads wait for the slowest.
One thread that shares its core with a busy program makes all wait for the scheduler again and again: on two cores,
beside one busy loop, two threads decode at half the speed of one. So the count follows the load of the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.core.clock import NS_PER_S, now_ns

# How often the load is read. The kernel counts in ticks of 10 ms, so a shorter time would measure mostly rounding.
INTERVAL_NS = NS_PER_S // 2
# A core still counts as ours while others use less than this share of it.
TOLERANCE = 0.3
_IDLE_FIELDS = (3, 4)  # idle and iowait, among the numbers of a "cpuN" line


@dataclass(frozen=True)
class CPUTimes:
    """Seconds since some fixed time: ``busy`` of all programs on our cores, ``own`` of this process."""

    busy: float
    own: float


def read_cpu_times(cores: frozenset[int]) -> CPUTimes | None:
    """As the kernel counts them now; None where ``/proc/stat`` does not exist or lacks one of ``cores``."""
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            busy = [_busy(line) for line in lines if _core_of(line) in cores]
    except (OSError, ValueError, IndexError):
        return None
    if len(busy) != len(cores):
        return None
    return CPUTimes(sum(busy) / os.sysconf("SC_CLK_TCK"), time.process_time())


def _core_of(line: str) -> int | None:
    name = line.split(" ", 1)[0]
    return int(name[3:]) if name.startswith("cpu") and len(name) > 3 else None


def _busy(line: str) -> int:
    ticks = [int(field) for field in line.split()[1:9]]  # the guests' fields after these are counted in user already
    return sum(ticks) - sum(ticks[i] for i in _IDLE_FIELDS)


class ThreadGovernor:
    """Chooses the number of compute threads, 1 to ``most``, from what others used in the last interval.

    ``read`` gives the CPU times (`read_cpu_times`; tests give their own); when it gives None, ``most`` is kept.
    """

    def __init__(self, most: int, cores: frozenset[int], read: Callable[[frozenset[int]], CPUTimes | None]) -> None:
        self._most = most
        self._cores = cores
        self._read = read
        self._threads = most
        self._last_ns = 0
        self._last: CPUTimes | None = None

    def choose(self, ns: int | None = None) -> int:
        """Threads for the step that begins now. Costs a microsecond, and 50 once an interval."""
        ns = now_ns() if ns is None else ns
        elapsed = ns - self._last_ns
        if elapsed >= INTERVAL_NS:
            times = self._read(self._cores)
            # After a pause the average over it says little about now: begin a new interval.
            if times is not None and self._last is not None and elapsed < 4 * INTERVAL_NS:
                self._follow((times.busy - times.own) - (self._last.busy - self._last.own), elapsed / NS_PER_S)
            self._last, self._last_ns = times, ns
        return self._threads

    def _follow(self, others_s: float, elapsed_s: float) -> None:
        left = len(self._cores) - others_s / elapsed_s
        self._threads = max(1, min(self._most, int(left + TOLERANCE)))
