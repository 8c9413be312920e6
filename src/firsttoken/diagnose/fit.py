"""What the sweeps say: fixed cost, ms a prompt token, ms an output token, ms for each further caller.

Lines by ordinary least squares. Per length the fastest sample counts: what waited for others says nothing of a length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from firsttoken.diagnose.sample import Sample


@dataclass(frozen=True)
class Fit:
    """None: the sweep that would tell was left out. ``fixed_ms`` (to the first token, without round trips) and
    ``prefill_ms_per_token`` are of requests that wait for nobody, ``queue_ms_per_caller`` and
    ``decode_ms_per_caller`` what each further request at once adds to the mean wait, and to each output token."""

    fixed_ms: float | None = None
    prefill_ms_per_token: float | None = None
    decode_ms_per_token: float | None = None
    queue_ms_per_caller: float | None = None
    decode_ms_per_caller: float | None = None


def fit(lengths: Mapping[int, Sequence[Sample]], crowds: Mapping[int, Sequence[Sample]], rtt_ms: float) -> Fit:
    points = [
        (statistics.fmean(one.computed_tokens for one in samples), min(one.wait_ms for one in samples) - rtt_ms)
        for samples in lengths.values()
    ]
    fixed, prefill = _line(points)
    waits = [(float(count), statistics.fmean(one.wait_ms for one in samples)) for count, samples in crowds.items()]
    tpots = [(float(count), tpot) for count, samples in crowds.items() if (tpot := _tpot(samples)) is not None]
    singles = [one for samples in lengths.values() for one in samples]
    return Fit(
        fixed_ms=fixed,
        prefill_ms_per_token=None if prefill is None else max(prefill, 0.0),
        decode_ms_per_token=_tpot([*singles, *crowds.get(1, ())]),
        queue_ms_per_caller=_line(waits)[1],
        decode_ms_per_caller=_line(tpots)[1],
    )


def _tpot(samples: Iterable[Sample]) -> float | None:
    found = [tpot for one in samples if (tpot := one.tpot_ms) is not None]
    return statistics.median(found) if found else None


def _line(points: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Intercept and slope; None for both with fewer than two places on the axis."""
    if len({x for x, _ in points}) < 2:
        return None, None
    slope, intercept = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return (intercept, slope) if math.isfinite(slope) else (None, None)
