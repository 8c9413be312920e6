"""The figures of a simulated run, kept as counts so that millions of gaps take little memory."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import chain, pairwise, repeat
from typing import Any

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.service import ClassTargets
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.observability.account import timings
from firsttoken.observability.percentiles import percentile, percentiles

# The stages that a simulation passes: from the arrival until the engine looks, and the engine's own.
STAGES = ("transport_ms", "queue_ms", "prefill_ms", "decode_ms")


class ClassFigures:
    """What the requests of one class got. Times in ns, told as percentile objects in ms.

    A request is good when its first token came within ``ttft_p99`` of the class's targets and 99 % of its gaps are
    within ``itl_p99``.
    """

    def __init__(self, targets: ClassTargets) -> None:
        self._targets = targets
        self._ttft = array("d")
        self._start = array("d")
        self._e2e = array("d")
        self._gaps: Counter[int] = Counter()
        self._good = 0
        self._stages: dict[str, array[float]] = {stage: array("d") for stage in STAGES}

    def add(self, timeline: Timeline, token_times: array[int]) -> None:
        """A request has ended: its timeline, whose first stamp is its arrival, and when each token was delivered."""
        began = timeline.times[0]
        ttft_ms = (token_times[0] - began) / NS_PER_MS
        self._ttft.append(ttft_ms)
        self._start.append(((timeline.first(Mark.SCHEDULED) or began) - began) / NS_PER_MS)
        self._e2e.append((token_times[-1] - began) / NS_PER_MS)
        gaps = [after - before for before, after in pairwise(token_times)]
        # To a microsecond, from 10 ms on to 10: of exact gaps hardly two are equal, and a day has millions.
        self._gaps.update([gap - gap % (1_000 if gap < 10_000_000 else 10_000) for gap in gaps])
        self._good += self._is_good(ttft_ms, gaps)
        account = timings(timeline)
        for stage, values in self._stages.items():
            values.append(account[stage])

    def _is_good(self, ttft_ms: float, gaps: list[int]) -> bool:
        wanted = self._targets
        if wanted.ttft_p99 is not None and ttft_ms > wanted.ttft_p99:
            return False
        return wanted.itl_p99 is None or not gaps or percentile(sorted(gaps), 0.99) <= wanted.itl_p99 * NS_PER_MS

    @property
    def good(self) -> int:
        """Requests within their targets."""
        return self._good

    @property
    def ttft_ms(self) -> list[float]:
        """Ascending."""
        return sorted(self._ttft)

    @property
    def start_ms(self) -> list[float]:
        """From the arrival until it was first scheduled, ascending."""
        return sorted(self._start)

    @property
    def itl_ms(self) -> list[float]:
        """Every gap, ascending, to within 0.1 %."""
        return list(chain.from_iterable(repeat(ns / NS_PER_MS, count) for ns, count in sorted(self._gaps.items())))

    @property
    def e2e_ms(self) -> list[float]:
        """Ascending."""
        return sorted(self._e2e)

    def result(self, virtual_ns: int) -> dict[str, Any]:
        """``goodput`` in requests a second of the run's ``virtual_ns``."""
        return {
            "requests": len(self._ttft),
            "good": self._good,
            "start_ms": percentiles(self._start),
            "ttft_ms": percentiles(self._ttft),
            "itl_ms": percentiles(self.itl_ms),
            "e2e_ms": percentiles(self._e2e),
            "goodput": self._good * NS_PER_S / virtual_ns if virtual_ns else 0.0,
            "stages_ms": {stage.removesuffix("_ms"): percentiles(values) for stage, values in self._stages.items()},
        }
