"""Step times of a recording: the model fitted to its own steps, and how they scatter about it."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.step_record import StepRecord
from firsttoken.core.step_sizes import StepSizes
from firsttoken.observability.percentiles import percentiles
from firsttoken.scheduler.step_learner import StepKind, kind_of
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad, fit_loads

# Of each sort of step so many make a model. Of more than so many, some are drawn.
LEAST_DECODE, LEAST_PROMPT = 32, 16
MOST = 1500
# Steps that took so many times longer or less than the model says did something else besides.
OUTLIER = 3.0
# How far a step is off is drawn from so many that ran about then.
NEAR = 16


class _Timed(NamedTuple):
    load: StepLoad
    ms: float
    began_ns: int


class TooFewSteps(Exception):
    """A recording has not enough steps for a model of their times; the message says of which sort."""


class Scatter(NamedTuple):
    """Of the steps of one kind in their order: when each began, and its measured time as a share of the model's."""

    times: list[int]
    shares: list[float]

    def near(self, ns: int, rng: random.Random) -> float:
        """The share of one of the `NEAR` steps that began nearest to ``ns``."""
        place = bisect_left(self.times, ns) - NEAR // 2
        first = max(0, min(place, len(self.times) - NEAR))
        return self.shares[rng.randrange(first, min(first + NEAR, len(self.shares)))]


@dataclass(frozen=True)
class RecordedSteps:
    """``model`` is fitted, ``scatter`` is what it leaves open; ``error``: of each kind, percentiles of how far measured
    times are from the model's, as shares of those; ``host_ms`` the loop's own work for a step, beside its time."""

    model: FittedStepTime
    scatter: dict[StepKind, Scatter]
    error: dict[str, dict[str, float]]
    host_ms: float


class ScatteredStepTime:
    """``recorded.model`` times a share that a step of the kind had about then, for a simulation under a virtual clock,
    which asks once for each step. It began at ``began_ns`` of the recording and runs ``scale`` times as fast. So a
    device that others kept busy for a while is as slow here, and at the same time.

    The same ``seed`` gives the same times to the same questions.
    """

    def __init__(self, recorded: RecordedSteps, began_ns: int, scale: float = 1.0, seed: int = 0) -> None:
        self._recorded = recorded
        self._began_ns = began_ns
        self._scale = scale
        self._random = random.Random(seed)

    def ms(self, load: StepLoad) -> float:
        ms = self._recorded.model.ms(load)
        found = self._recorded.scatter.get(kind_of(load))
        if found is None:
            return ms
        return ms * found.near(self._began_ns + round(now_ns() * self._scale), self._random)


def load_recorded(step: StepRecord) -> StepLoad:
    return StepLoad(step.decode_rows, step.decode_context, step.prefill_tokens, step.prefill_pairs, step.prefill_reach)


def fit_recorded(steps: Sequence[StepRecord], sizes: StepSizes, in_flight: int, seed: int = 0) -> RecordedSteps:
    """The model of a recording's steps, which are in their order. ``sizes``: what the device pads to. Raises
    `TooFewSteps`."""
    timed = list(_times(steps, in_flight))
    decode = [one for one in timed if kind_of(one.load) is StepKind.DECODE]
    prompt = [one for one in timed if kind_of(one.load) is not StepKind.DECODE]
    for found, least, name in ((decode, LEAST_DECODE, "that only decode"), (prompt, LEAST_PROMPT, "with prompts")):
        if len(found) < least:
            raise TooFewSteps(f"the recording has {len(found)} steps {name}, and a model of step times takes {least}")
    rng = random.Random(seed)
    model = _fit([*_some(decode, rng), *_some(prompt, rng)], sizes)
    scatter: dict[StepKind, Scatter] = {}
    for one in timed:
        found_times, shares = scatter.setdefault(kind_of(one.load), Scatter([], []))
        found_times.append(one.began_ns)
        shares.append(one.ms / model.ms(one.load))
    error = {
        kind.name.lower(): percentiles([abs(share - 1) for share in found.shares])
        for kind, found in sorted(scatter.items())
    }
    return RecordedSteps(model, scatter, error, _host_ms(steps, in_flight))


def _fit(timed: Sequence[_Timed], sizes: StepSizes) -> FittedStepTime:
    """Fitted twice: the second time without those that were far off the first."""
    first = fit_loads([one.load for one in timed], [one.ms for one in timed], sizes)
    usual = [one for one in timed if 1 / OUTLIER < one.ms / first.ms(one.load) < OUTLIER]
    if len(usual) == len(timed) or len(usual) < LEAST_PROMPT:
        return first
    return fit_loads([one.load for one in usual], [one.ms for one in usual], sizes)


def _some(timed: list[_Timed], rng: random.Random) -> list[_Timed]:
    return timed if len(timed) <= MOST else rng.sample(timed, MOST)


def _times(steps: Sequence[StepRecord], in_flight: int) -> Iterator[_Timed]:
    """With one step in flight the device waits while the host reads a result and launches the next step: that belongs
    to the step behind it, else a host that others keep busy would be forgotten. With more it goes on meanwhile."""
    before_ns = 0
    for step in steps:
        began_ns = step.started_ns
        if in_flight == 1:
            # Rows that decode were there when the step before ended; a step of prompts alone may have waited for them.
            began_ns = before_ns if step.decode_rows and before_ns else step.planned_ns
        before_ns = step.ended_ns
        if step.ended_ns > began_ns and step.decode_rows + step.prefill_tokens:
            yield _Timed(load_recorded(step), (step.ended_ns - began_ns) / NS_PER_MS, began_ns)


def _host_ms(steps: Sequence[StepRecord], in_flight: int) -> float:
    """To plan and launch a step, where that is not in its time."""
    return 0.0 if in_flight == 1 else median(step.submitted_ns - step.planned_ns for step in steps) / NS_PER_MS
