"""A model of step times that goes on learning from the steps that the engine runs."""

from __future__ import annotations

import math
from collections import deque
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from firsttoken.scheduler.step_time import FittedStepTime, StepLoad

# A step counts half as much 350 steps later: devices change their clocks within seconds, batches within minutes.
FORGETTING = 0.998
FADE = FORGETTING**-0.5
# How far a prior may be off, against the noise of a step's time, as variances: a handful of steps outweighs it.
PRIOR_VARIANCE = 100.0
# A relative error of more typical errors than this counts no more than one of so many: what comes now and then, a step
# that was not captured or a clock that was read late, is no news about the device.
OUTLIER = 3.0
FIRST_ERROR, LEAST_ERROR = 0.1, 0.005
# By so much the typical error follows each step: a device that has become slower for good is believed after some tens.
ERROR_STEP = 1.05
LEAST_SCALE = 0.01
ERROR_WINDOW = 256
KNOWN_SIZES = 4096
# Steps of decode rows alone are so alike that one of so many is enough to learn from.
LEARN_EVERY = 32
# To plan and launch a step takes up to two milliseconds, and what a step takes is foreseen to a tenth in nine of ten.
LEAD_NS = 2_000_000
LEAD_PART = 6


def lead_ns(foreseen_ns: int) -> int:
    """How long before the end of a step that should take so long the next one is planned: early enough to be there in
    time, and late enough for all who come while the step runs."""
    return max(LEAD_NS, foreseen_ns // LEAD_PART)


Parts = tuple[float, float, float, float]
"""Of a step's time by the prior, ms: reading weights, what more tokens add to it, reading KV, attention of chunks."""


class StepKind(IntEnum):
    DECODE = 0
    MIXED = 1
    PREFILL = 2


class StepErrors(NamedTuple):
    """Of the last ``steps`` steps of a kind, 256 at most: |predicted - measured| / measured."""

    steps: int
    median: float
    p90: float


class LearningStepTime:
    """The `Parts` of a step by ``prior``, each times a scale of its own that is learned for each kind of step.

    Until a step of a kind was seen, its scales are those that another kind has learned, and until any was seen, 1.
    Scales are never below `LEAST_SCALE`, and a mixed step is never predicted to take less than its decode rows or its
    chunks alone; so, as ``prior`` grows with each component of a load, this does. One thread learns and predicts.
    Raises `ValueError` for a prior by which the smallest step takes no time: no scale would change that.
    """

    def __init__(self, prior: FittedStepTime) -> None:
        self._prior = prior
        # Steps come in few sizes, and each is asked for again and again.
        self._products = lru_cache(maxsize=KNOWN_SIZES)(prior.products)
        self._least = prior.knots[0][1]
        if not self._least > 0:
            raise ValueError(f"by the prior the smallest step takes {self._least} ms; it must take more than 0")
        self._kinds = self._decode, self._mixed, self._prefill = _Scales(), _Scales(), _Scales()  # as in `StepKind`
        self._errors: list[deque[float]] = [deque(maxlen=ERROR_WINDOW) for _ in StepKind]

    def ms(self, load: StepLoad) -> float:
        """0 for a load of nothing."""
        rows, context, tokens, pairs, reach = load
        prior, least = self._prior, self._least
        kv, chunks = prior.per_context * context, prior.chunks(pairs, reach)
        slowest = 0.0
        if rows:
            slowest = self._decode.ms((least, self._products(rows, 0) - least, kv, 0.0))
        if tokens:
            slowest = max(slowest, self._prefill.ms((least, self._products(0, tokens) - least, 0.0, chunks)))
        if rows and tokens:
            slowest = max(slowest, self._mixed.ms((least, self._products(rows, tokens) - least, kv, chunks)))
        return slowest

    def learn(self, load: StepLoad, ms: float) -> None:
        """Take in that a step of this load took ``ms``. No time, or none that can be measured, says nothing."""
        if not 0 < ms < math.inf:
            return
        kind = kind_of(load)
        self._errors[kind].append(abs(self.ms(load) - ms) / ms)
        scales = self._kinds[kind]
        scales.learn(self._parts(load), ms)
        for other in self._kinds:
            if not other.seen:
                other.follow(scales)

    def errors(self, kind: StepKind) -> StepErrors:
        """How good the last predictions were, each made before its step was learned from; 0 without steps."""
        errors = sorted(self._errors[kind])
        if not errors:
            return StepErrors(0, 0.0, 0.0)
        return StepErrors(len(errors), errors[len(errors) // 2], errors[len(errors) * 9 // 10])

    def _parts(self, load: StepLoad) -> Parts:
        rows, context, tokens, pairs, reach = load
        prior, least = self._prior, self._least
        rise = self._products(rows, tokens) - least
        return least, rise, prior.per_context * context, prior.chunks(pairs, reach)


def kind_of(load: StepLoad) -> StepKind:
    if not load.prefill_tokens:
        return StepKind.DECODE
    return StepKind.MIXED if load.decode_rows else StepKind.PREFILL


class _Scales:
    """Recursive least squares with forgetting on relative errors, so that a short step counts as much as a long one."""

    __slots__ = ("_covariance", "_error", "_scales", "seen")

    def __init__(self) -> None:
        self.seen = False
        self._scales: Parts = (1.0, 1.0, 1.0, 1.0)
        self._covariance = [[PRIOR_VARIANCE * (a == b) for b in range(4)] for a in range(4)]
        self._error = FIRST_ERROR

    def ms(self, parts: Parts) -> float:
        a, b, c, d = self._scales
        return a * parts[0] + b * parts[1] + c * parts[2] + d * parts[3]

    def follow(self, other: _Scales) -> None:
        self._scales = other._scales

    def learn(self, parts: Parts, ms: float) -> None:
        self.seen = True
        predicted = self.ms(parts)
        error = ms / predicted - 1.0
        weight = min(1.0, OUTLIER * self._error / (abs(error) or 1.0))
        self._error *= ERROR_STEP if abs(error) > self._error else 1 / ERROR_STEP
        self._error = max(self._error, LEAST_ERROR)
        x, y, z, w = [part / predicted for part in parts]
        covariance = self._covariance
        turned = [a * x + b * y + c * z + d * w for a, b, c, d in covariance]
        total = FORGETTING / weight + turned[0] * x + turned[1] * y + turned[2] * z + turned[3] * w
        step = error / total
        a, b, c, d = [max(scale + step * gain, LEAST_SCALE) for scale, gain in zip(self._scales, turned, strict=True)]
        self._scales = a, b, c, d
        # What steps of one sort say nothing about must not become ever less certain: the first of another sort would
        # throw a scale anywhere. Rows and columns grow alike, so this stays a covariance.
        grown = [FADE if line[place] < PRIOR_VARIANCE else 1.0 for place, line in enumerate(covariance)]
        p, q, r, s = turned
        e, f, g, h = grown
        self._covariance = [
            [
                (a - t * p / total) * by * e,
                (b - t * q / total) * by * f,
                (c - t * r / total) * by * g,
                (d - t * s / total) * by * h,
            ]
            for (a, b, c, d), t, by in zip(covariance, turned, grown, strict=True)
        ]
