"""The throughput/latency frontier: what each policy and batch window makes of rising loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from firsttoken.bench.arrivals import Mix
from firsttoken.core.service import Targets
from firsttoken.observability.percentiles import percentile
from firsttoken.scheduler.step_time import StepTime
from firsttoken.scheduler.window import NO_WINDOW, find_window
from firsttoken.simulate.policies import Policy
from firsttoken.simulate.run import EngineShape, Outcome, simulate
from firsttoken.simulate.workload import Job, poisson_jobs

# Of the requests, for a load to be called carried.
CARRIED = 0.99
# A capacity is found to this share of itself.
PRECISION = 0.01
FIRST_RATE, MOST_RATE = 1.0, 4096.0


Latency = Literal["ttft_p99_ms", "itl_p99_ms"]


class Point(NamedTuple):
    """One policy, named with its window if it has one, at one offered load; requests a second, and ms over all
    classes."""

    policy: str
    offered_rps: float
    goodput_rps: float
    ttft_p99_ms: float
    itl_p99_ms: float


def measure(
    policy: Policy,
    window: str,
    jobs: Sequence[Job],
    rate: float,
    engine: EngineShape,
    step_time: StepTime,
    targets: Targets,
) -> Point:
    """Serve ``jobs``, which come at ``rate``. Raises `ConfigError`."""
    made = find_window(window, targets, queue_limit=engine.max_num_seqs, step_time=step_time)
    outcome = simulate(jobs, policy, engine, step_time, targets, window=made)
    return Point(
        policy.name if window == NO_WINDOW else f"{policy.name}, window {window}",
        rate,
        # Over the time of the load, or of serving it where that is longer.
        good(outcome) / max(outcome.virtual_ns / 1e9, len(jobs) / rate),
        _p99(figures.ttft_ms for figures in outcome.classes.values()),
        _p99(figures.itl_ms for figures in outcome.classes.values()),
    )


def good(outcome: Outcome) -> int:
    """Requests within their targets, of all classes."""
    return sum(figures.good for figures in outcome.classes.values())


def pareto(points: Iterable[Point], latency: Latency = "ttft_p99_ms") -> list[Point]:
    """Those that no other beats in goodput without being slower, by rising goodput."""

    def ms(point: Point) -> float:
        return point.ttft_p99_ms if latency == "ttft_p99_ms" else point.itl_p99_ms

    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.goodput_rps, ms(each))):
        if not best or ms(point) < ms(best[-1]):
            best.append(point)
    return best[::-1]


def capacity(
    policy: Policy, engine: EngineShape, step_time: StepTime, targets: Targets, mix: Mix, *, seconds: float, seed: int
) -> float:
    """The highest rate, in requests a second, at which 99 % of the requests keep their targets; 0 where even one
    request a second is too much."""

    def carried(rate: float) -> bool:
        jobs = poisson_jobs(rate, seconds, mix, seed)
        return good(simulate(jobs, policy, engine, step_time, targets)) >= CARRIED * len(jobs)

    low, high = 0.0, FIRST_RATE
    while carried(high):
        low, high = high, 2 * high
        if high > MOST_RATE:
            return low
    if not low:
        return 0.0
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        low, high = (middle, high) if carried(middle) else (low, middle)
    return low


def _p99(values: Iterable[Sequence[float]]) -> float:
    ordered = sorted(chain.from_iterable(values))
    return percentile(ordered, 0.99) if ordered else 0.0
