"""What callers felt in the last minute: sliding percentiles by service class, for whoever looks at a live picture.

Each second has its own sparse counts, so that observing is a dictionary entry, and the minute is put together only when
somebody asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, get_args

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.outcome import Outcome
from firsttoken.core.service import CLASS_NAMES
from firsttoken.core.step_record import StepRecord

WINDOW_S = 60
# Rates follow what happens now; percentiles need more to stand on. One window for all rates, so that they agree.
RATE_S = 5
# Buckets in a doubling: each is 6 % wide, so that a percentile is off by half of that at most.
PER_OCTAVE = 12
_LEVELS = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99))
_US_PER_S = 1e6


class SlidingCounts:
    """Counts of the last ``window_s`` seconds by a small number. One thread adds and reads."""

    __slots__ = ("_counts", "_second", "_seconds", "_sum", "_window_s")

    def __init__(self, window_s: int = WINDOW_S) -> None:
        self._window_s = window_s
        self._second = 0
        self._counts: dict[int, int] = {}  # of the second that goes on
        self._seconds: deque[tuple[int, dict[int, int]]] = deque()  # that are over, and had anything
        self._sum: dict[int, int] = {}  # of those

    def add(self, key: int, times: int = 1) -> None:
        """``times`` may be 0: it is then as if nothing had happened."""
        if not times:
            return
        second = now_ns() // NS_PER_S
        if second != self._second:
            self._turn(second)
        counts = self._counts
        counts[key] = counts.get(key, 0) + times

    def read(self) -> dict[int, int]:
        """The window's counts."""
        self._turn(now_ns() // NS_PER_S)
        merged = dict(self._sum)
        _merge(merged, self._counts, 1)
        return merged

    def per_second(self, last_s: int = RATE_S) -> float:
        """How many there were a second, in the last ``last_s`` whole seconds."""
        second = now_ns() // NS_PER_S
        self._turn(second)
        total = 0
        for of, counts in reversed(self._seconds):
            if of < second - last_s:
                break
            total += sum(counts.values())
        return total / last_s

    def _turn(self, second: int) -> None:
        if second == self._second:
            return
        if self._counts:
            self._seconds.append((self._second, self._counts))
            _merge(self._sum, self._counts, 1)
            self._counts = {}
        self._second = second
        oldest = second - self._window_s
        while self._seconds and self._seconds[0][0] <= oldest:
            _merge(self._sum, self._seconds.popleft()[1], -1)


class SlidingPercentiles(SlidingCounts):
    """Durations of the last ``window_s`` seconds."""

    __slots__ = ()

    def observe(self, seconds: float, times: int = 1) -> None:
        us = seconds * _US_PER_S
        self.add(int(log2(us) * PER_OCTAVE) if us > 1.0 else 0, times)

    def percentiles_ms(self) -> dict[str, Any]:
        """``{"count", "p50", "p90", "p95", "p99"}``; the percentiles are None of nothing."""
        counts = self.read()
        total = sum(counts.values())
        return {"count": total} | _percentiles_ms(sorted(counts.items()), total)


class ClassWindow:
    """The last minute of one service class."""

    __slots__ = ("_ended", "e2e", "itl", "ttft")

    def __init__(self) -> None:
        self.ttft = SlidingPercentiles()
        self.itl = SlidingPercentiles()
        self.e2e = SlidingPercentiles()
        self._ended: dict[str, SlidingCounts] = {}

    def ended(self, outcome: str, answers: int) -> None:
        """Answers that ended so."""
        if outcome not in self._ended:
            self._ended[outcome] = SlidingCounts()
        self._ended[outcome].add(0, answers)

    def read(self) -> dict[str, Any]:
        """Percentiles and outcomes of the last minute, rates of the last seconds."""
        return {
            "ttft_ms": self.ttft.percentiles_ms(),
            "itl_ms": self.itl.percentiles_ms(),
            "e2e_ms": self.e2e.percentiles_ms(),
            "requests_per_s": self.e2e.per_second(),
            "tokens_per_s": round(self.ttft.per_second() + self.itl.per_second(), 1),
            "ended": {outcome: counts.read().get(0, 0) for outcome, counts in self._ended.items()},
        }


class LiveWindows:
    """The last minute of every class, in the order of `core.service.ServiceClass`, and of callers' requests."""

    __slots__ = ("_over", "_prompt_tokens", "_step_tokens", "_steps", "classes")

    def __init__(self) -> None:
        self._steps, self._step_tokens, self._prompt_tokens = SlidingCounts(), SlidingCounts(), SlidingCounts()
        self.classes = [ClassWindow() for _ in CLASS_NAMES]
        self._over: dict[Outcome, SlidingCounts] = {outcome: SlidingCounts() for outcome in get_args(Outcome)}

    def request_over(self, outcome: Outcome) -> None:
        """A caller's request ended so, wherever that was decided."""
        self._over[outcome].add(0)

    def ran(self, records: Sequence[StepRecord]) -> None:
        """Take the engine's records of its steps over, each once."""
        prompts = sum([one.prefill_tokens for one in records])
        self._steps.add(0, len(records))
        self._prompt_tokens.add(0, prompts)
        self._step_tokens.add(0, prompts + sum([one.decode_rows for one in records]))

    def rates(self, classes: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
        """Of everybody, over the same seconds as those of ``classes``, which `read` has told: requests that were
        answered in full, tokens as they were given out, steps, and tokens that these computed."""
        steps = self._steps.per_second()
        return {
            "requests_per_s": round(sum([one["requests_per_s"] for one in classes.values()]), 2),
            "output_tokens_per_s": round(sum([one["tokens_per_s"] for one in classes.values()]), 1),
            "prompt_tokens_per_s": round(self._prompt_tokens.per_second(), 1),
            "steps_per_s": round(steps, 1),
            "tokens_per_step": round(self._step_tokens.per_second() / steps, 2) if steps else None,
        }

    def outcomes(self) -> dict[str, int]:
        """How requests ended in the last minute."""
        return {outcome: counts.read().get(0, 0) for outcome, counts in self._over.items()}

    def read(self) -> Mapping[str, dict[str, Any]]:
        """By the classes' names. A few tenths of a millisecond under load."""
        return {name: window.read() for name, window in zip(CLASS_NAMES, self.classes, strict=True)}


def _merge(into: dict[int, int], counts: Mapping[int, int], sign: int) -> None:
    """Add the counts, or with a ``sign`` of -1 take them away again."""
    for key, count in counts.items():
        left = into.get(key, 0) + sign * count
        if left:
            into[key] = left
        else:
            del into[key]


def _percentiles_ms(buckets: list[tuple[int, int]], total: int) -> dict[str, float | None]:
    """Of counts by bucket, ascending; inside a bucket they are thought to lie evenly on its logarithmic scale."""
    found: dict[str, float | None] = dict.fromkeys((name for name, _ in _LEVELS), None)
    at = iter(buckets)
    bucket, count = next(at, (0, 0))
    below = 0
    for name, share in _LEVELS if total else ():
        rank = share * total
        while below + count < rank:
            below += count
            bucket, count = next(at)
        inside = (rank - below) / count
        found[name] = round(2.0 ** ((bucket + inside) / PER_OCTAVE) * 1e3 / _US_PER_S, 4)
    return found
