"""What is told of the model of step times."""

from __future__ import annotations

from firsttoken.core.clock import NS_PER_MS
from firsttoken.scheduler.step_learner import LearningStepTime, StepKind
from firsttoken.transport.messages import StepTimeErrors

# To ask for them sorts some hundred numbers for each kind, and whoever reads them does so every few seconds.
ERRORS_NS = 500 * NS_PER_MS


class StepGauges:
    """Reads a `LearningStepTime`; what it says may be `ERRORS_NS` old."""

    def __init__(self, step_time: LearningStepTime) -> None:
        self._step_time = step_time
        self._errors: dict[str, StepTimeErrors] = {}
        self._looked_ns: int | None = None

    def read(self, now_ns: int) -> dict[str, StepTimeErrors]:
        """By the kind's name; none of a kind of which no step was seen."""
        if self._looked_ns is None or now_ns - self._looked_ns >= ERRORS_NS:
            self._looked_ns = now_ns
            found = {kind.name.lower(): self._step_time.errors(kind) for kind in StepKind}
            self._errors = {name: StepTimeErrors(*errors) for name, errors in found.items() if errors.steps}
        return self._errors
