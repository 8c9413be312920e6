"""Figures of many requests, under the names of the result objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firsttoken.bench.requests import Timed
from firsttoken.observability.account import STAGES
from firsttoken.observability.percentiles import percentile, percentiles


def latency_figures(requests: Sequence[Timed]) -> dict[str, Any]:
    """Percentile objects in ms over ``requests`` (each with a token at least): ``ttft_ms`` and ``e2e_ms`` from the
    sending on, ``tpot_ms`` one value a request, ``itl_ms`` one value a gap; and in ``stages_ms`` those of each stage
    that took any time."""
    stages = {name: [one.stages.get(name, 0.0) for one in requests] for name in STAGES}
    return {
        "ttft_ms": percentiles(one.ttft_ms for one in requests),
        "tpot_ms": percentiles(tpot for one in requests if (tpot := one.tpot_ms) is not None),
        "itl_ms": percentiles(gap for one in requests for gap in one.gaps_ms),
        "e2e_ms": percentiles(one.e2e_ms for one in requests),
        "stages_ms": {name.removesuffix("_ms"): percentiles(values) for name, values in stages.items() if any(values)},
    }


def within_targets(request: Timed, ttft_ms: float | None, itl_ms: float | None) -> bool:
    """True for a request that ended well, whose first token came within ``ttft_ms`` and 99 % of whose gaps (its own
    p99) within ``itl_ms``; None asks for nothing."""
    if not request.ok:
        return False
    if ttft_ms is not None and request.ttft_ms > ttft_ms:
        return False
    gaps = sorted(request.gaps_ms)
    return itl_ms is None or not gaps or percentile(gaps, 0.99) <= itl_ms


def target_figures(ttft_ms: float | None, itl_ms: float | None, figures: dict[str, Any]) -> dict[str, Any]:
    """Each stated target beside the p99 of ``figures`` that it bounds (None without an answer), and whether that
    keeps it."""
    stated = {"ttft_ms": ttft_ms, "itl_ms": itl_ms}
    # Answers of one token have no gap, and keep any bound on gaps; no answers keep nothing.
    answered = bool(figures["ttft_ms"])
    found = {}
    for name, target in stated.items():
        if target is not None:
            p99 = figures[name].get("p99")
            found[name] = {"target": target, "p99": p99, "met": answered if p99 is None else p99 <= target}
    return found
