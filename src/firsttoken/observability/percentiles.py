"""The one definition of a percentile object, used by every figure that is reported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_LEVELS = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``ordered`` (ascending, not empty) lies.

    Linear interpolation between the neighbours, as numpy's default.
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """``{"mean", "p50", "p90", "p95", "p99", "max"}`` in the unit of ``values``; {} when there are none."""
    ordered = sorted(values)
    if not ordered:
        return {}
    result = {"mean": math.fsum(ordered) / len(ordered)}
    result |= {name: percentile(ordered, share) for name, share in _LEVELS}
    result["max"] = ordered[-1]
    return result
