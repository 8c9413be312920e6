"""The step ledger: what each of the last steps did and when, in a ring of fixed size."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.step_record import StepRecord
from firsttoken.observability.percentiles import percentiles


class StepLedger:
    """The last ``capacity`` records, oldest first. One thread appends; any thread may take a snapshot."""

    __slots__ = ("_ring", "append")

    def __init__(self, capacity: int = 4096) -> None:
        if capacity < 1:
            raise ValueError(f"capacity of the step ledger must be 1 or more, got {capacity}")
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self.append = self._ring.append  # bound once: the loop pays for one C call a step

    def __len__(self) -> int:
        return len(self._ring)

    def snapshot(self) -> list[StepRecord]:
        """The records at this moment, oldest first."""
        return list(self._ring.copy())


def summary(records: Iterable[StepRecord]) -> dict[str, Any]:
    """Percentiles over ``records``, in ms: of planning, of waiting for the device, of compute and its two segments, of
    the wait until the result was read, of garbage collection (of the steps that had any), of the loop's wait for a
    processor, and of the gap from one step's end of compute to the next one's begin (0 when they overlap): the device's
    idle time while the loop had work in flight."""
    steps = list(records)
    gaps = [max(after.started_ns - before.ended_ns, 0) for before, after in pairwise(steps)]
    return {
        "steps": len(steps),
        "captured": sum(step.captured for step in steps),
        "plan_ms": _ms(step.submitted_ns - step.planned_ns for step in steps),
        "lane_ms": _ms(step.started_ns - step.submitted_ns for step in steps),
        "compute_ms": _ms(step.ended_ns - step.started_ns for step in steps),
        "forward_ms": _ms(step.forward_ns for step in steps),
        "sample_ms": _ms(step.sample_ns for step in steps),
        "harvest_ms": _ms(step.harvested_ns - step.ended_ns for step in steps),
        "gc_ms": _ms(step.gc_ns for step in steps if step.gc_ns),
        "run_queue_ms": _ms(step.run_queue_ns for step in steps),
        "gap_ms": _ms(gaps),
    }


class GCClock:
    """Sums the time that this process's garbage collector takes. ``start`` hooks it in, ``stop`` takes it out."""

    __slots__ = ("_began", "_total")

    def __init__(self) -> None:
        self._began = 0
        self._total = 0

    def start(self) -> None:
        if self._on_gc not in gc.callbacks:
            gc.callbacks.append(self._on_gc)

    def stop(self) -> None:
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def take(self) -> int:
        """Nanoseconds since the last call."""
        total, self._total = self._total, 0
        return total

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = now_ns()
        elif self._began:
            self._total += now_ns() - self._began
            self._began = 0


class RunQueueClock:
    """How long one thread waited for a processor while it could have run, as Linux counts it. ``start`` is called by
    that thread. Where the kernel keeps no such count, it stays 0."""

    __slots__ = ("_file", "_last")

    def __init__(self) -> None:
        self._file: int | None = None
        self._last = 0

    def start(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self._last = self._read()

    def stop(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def take(self) -> int:
        """Nanoseconds since the last call. Costs about a microsecond: the file is kept open."""
        if self._file is None:
            return 0
        total = self._read()
        waited, self._last = total - self._last, total
        return waited

    def _read(self) -> int:
        """The second number of ``schedstat``: ns spent runnable and not running."""
        assert self._file is not None
        try:
            return int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return self._last


def _ms(values: Iterable[int]) -> dict[str, float]:
    return percentiles(value / NS_PER_MS for value in values)
