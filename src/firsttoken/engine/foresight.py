"""What the steps that are launched compute, and how long they should take."""

from __future__ import annotations

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.plan import StepPlan
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_time import StepLoad

# Steps of the same decode rows differ by a token of context each, which shows after some tens.
ASK_EVERY = 16


class Foresight:
    """Of each plan, in their order. Nearly all steps are those of the same decode rows as the one before, and not to
    add them up anew saves their host several microseconds."""

    def __init__(self, step_time: LearningStepTime) -> None:
        self._step_time = step_time
        self._last = StepLoad(0, 0, 0, 0)
        self._foreseen_ns = 0
        self._repeated = 0

    def of(self, plan: StepPlan) -> tuple[StepLoad, int]:
        """The step's load, and its time in ns."""
        rows, last = len(plan.work), self._last
        newest = plan.work[-1]
        # Decode rows come first. A row that joins them has been started, or was a chunk in the step before.
        if (
            rows == last.decode_rows
            and not last.prefill_tokens
            and newest.count == 1
            and newest.sample
            and not plan.starts
        ):
            load = StepLoad(rows, last.decode_context + rows, 0, 0)
            self._repeated += 1
        else:
            load = StepLoad.of(plan)
            self._repeated = 0
        self._last = load
        if not self._repeated % ASK_EVERY:
            self._foreseen_ns = round(self._step_time.ms(load) * NS_PER_MS)
        return load, self._foreseen_ns
