"""What the sweeps say: fixed cost, ms a prompt token, ms an output token, ms for each further caller.

Lines by ordinary least squares. Per length the fastest sample counts: what waited for others says nothing of a length.
A noisy server bends a line of few points: what is not twice its standard error is not told apart from 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from firsttoken.diagnose.sample import Sample


@dataclass(frozen=True)
class Fit:
    """None: the sweep that would tell was left out. ``fixed_ms`` (to the first token, without round trips) and
    ``prefill_ms_per_token`` are of requests that wait for nobody, ``queue_ms_per_caller`` and
    ``decode_ms_per_caller`` what each further request at once adds to the mean wait, and to each output token.

    As the lines have them, so that noise can make them negative (but a prompt token's). ``errors`` holds the standard
    errors in ms of those that come from a line through more than two points, by their names."""

    fixed_ms: float | None = None
    prefill_ms_per_token: float | None = None
    decode_ms_per_token: float | None = None
    queue_ms_per_caller: float | None = None
    decode_ms_per_caller: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """The figures as facts: a time is never negative. ``errors_ms`` are the standard errors (None: two points do
        not tell), ``told_apart`` says of each whether it can be told from 0."""
        found = {name: value for name in _FITTED if (value := getattr(self, name)) is not None}
        return {
            **{name: max(found[name], 0.0) if name in found else None for name in _FITTED},
            "errors_ms": {name: self.errors.get(name) for name in found if name in _OF_LINES},
            "told_apart": {name: value > _SURE * self.errors.get(name, 0.0) for name, value in found.items()},
        }


_OF_LINES = ("fixed_ms", "prefill_ms_per_token", "queue_ms_per_caller", "decode_ms_per_caller")
_FITTED = ("fixed_ms", "prefill_ms_per_token", "decode_ms_per_token", "queue_ms_per_caller", "decode_ms_per_caller")
_SURE = 2.0
_WORDS = {
    "fixed_ms": ("fixed cost of a request", "{:.2f}"),
    "prefill_ms_per_token": ("a prompt token", "{:.4f}"),
    "decode_ms_per_token": ("an output token", "{:.2f}"),
    "queue_ms_per_caller": ("more wait for each further caller", "{:.2f}"),
    "decode_ms_per_caller": ("more an output token for each further caller", "{:.3f}"),
}


def in_words(sweep: Mapping[str, Any]) -> dict[str, str]:
    """Of a `Fit.report`: what was found, and how much of it, with its standard error."""
    words = {}
    for name, (title, form) in _WORDS.items():
        if sweep[name] is None:
            continue
        error = sweep["errors_ms"].get(name)
        parts = [form.format(sweep[name])] if sweep[name] else []
        parts += [] if error is None else [f"± {form.format(error)}"]
        known = " ".join(parts) + " ms"
        if sweep["told_apart"][name]:
            words[title] = known
        else:
            words[title] = "not told apart from 0" + (f" ({known})" if parts else "")
    return words


class _Line(NamedTuple):
    """None where the points do not tell."""

    intercept: float | None = None
    slope: float | None = None
    intercept_error: float | None = None
    slope_error: float | None = None


def fit(lengths: Mapping[int, Sequence[Sample]], crowds: Mapping[int, Sequence[Sample]], rtt_ms: float) -> Fit:
    points = [
        (statistics.fmean(one.computed_tokens for one in samples), min(one.wait_ms for one in samples) - rtt_ms)
        for samples in lengths.values()
    ]
    of_lengths = _line(points)
    waits = [(float(count), statistics.fmean(one.wait_ms for one in samples)) for count, samples in crowds.items()]
    tpots = [(float(count), tpot) for count, samples in crowds.items() if (tpot := _tpot(samples)) is not None]
    of_waits, of_tpots = _line(waits), _line(tpots)
    singles = [one for samples in lengths.values() for one in samples]
    errors = {
        "fixed_ms": of_lengths.intercept_error,
        "prefill_ms_per_token": of_lengths.slope_error,
        "queue_ms_per_caller": of_waits.slope_error,
        "decode_ms_per_caller": of_tpots.slope_error,
    }
    return Fit(
        fixed_ms=of_lengths.intercept,
        prefill_ms_per_token=None if of_lengths.slope is None else max(of_lengths.slope, 0.0),
        decode_ms_per_token=_tpot([*singles, *crowds.get(1, ())]),
        queue_ms_per_caller=of_waits.slope,
        decode_ms_per_caller=of_tpots.slope,
        errors={name: error for name, error in errors.items() if error is not None},
    )


def _tpot(samples: Iterable[Sample]) -> float | None:
    found = [tpot for one in samples if (tpot := one.tpot_ms) is not None]
    return statistics.median(found) if found else None


def _line(points: Sequence[tuple[float, float]]) -> _Line:
    """By least squares; nothing with fewer than two places on the axis, no errors with fewer than three points."""
    if len({x for x, _ in points}) < 2:
        return _Line()
    places = [x for x, _ in points]
    slope, intercept = statistics.linear_regression(places, [y for _, y in points])
    if not math.isfinite(slope):
        return _Line()
    if len(points) < 3:
        return _Line(intercept, slope)
    mean = statistics.fmean(places)
    spread = sum((x - mean) ** 2 for x in places)
    noise = sum((y - intercept - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    at_zero = noise * (1 / len(points) + mean**2 / spread)
    return _Line(intercept, slope, math.sqrt(at_zero), math.sqrt(noise / spread))
