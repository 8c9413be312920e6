"""How late a firsttoken server's event loop wakes up, from its Prometheus metrics: a sign that its host is too busy."""

from __future__ import annotations

from dataclasses import dataclass

_NAME = b"firsttoken_event_loop_lag_seconds"


@dataclass(frozen=True)
class LoopLag:
    """Since the server's start."""

    total_s: float
    count: float


def loop_lag(metrics: bytes) -> LoopLag | None:
    """Out of a page of metrics in Prometheus' text format; None where it has no such histogram."""
    found: dict[bytes, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(b" ")
        if name in (_NAME + b"_sum", _NAME + b"_count"):
            found[name] = float(value)
    if len(found) < 2:
        return None
    return LoopLag(found[_NAME + b"_sum"], found[_NAME + b"_count"])


def mean_between(before: LoopLag | None, after: LoopLag | None) -> float | None:
    """ms; None where the one or the other is not known, or nothing was counted between them."""
    if before is None or after is None or after.count <= before.count:
        return None
    return (after.total_s - before.total_s) / (after.count - before.count) * 1e3
