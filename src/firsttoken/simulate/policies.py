"""The scheduling policies that can be compared: the engine's own, and what other engines do.

A policy is a `Budget` and, where it deviates from the scheduler's rules, a subclass of the real scheduler that
overrides only the rule in question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.core.errors import ConfigError
from firsttoken.core.request import Request
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Budget, PlannedStep, Scheduler, SchedulerConfig, StepTotal, TokenCap
from firsttoken.scheduler.shares import PrefillShares
from firsttoken.scheduler.step import StepBuilder
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_time import FittedStepTime, StepTime

DEFAULT = "default"
PREFILL_FIRST = "prefill-first"
# Token rows of a step, decode rows included.
FCFS_TOTALS = {f"fcfs-{total}": total for total in (512, 2048, 8192)}
PREFILL_FIRST_TOKENS = 8192

POLICY_NAMES = (DEFAULT, *FCFS_TOTALS, PREFILL_FIRST)


class FirstComeScheduler(Scheduler):
    """The oldest prompt takes all tokens that a step has for prompts, the next what it leaves, and so on.

    Use it with ``max_passes=0``: then nobody is admitted before those who came earlier.
    """

    def _plan_prefills(self, step: StepBuilder, prefills: list[Request], tokens: int, *, admit: bool) -> None:
        prefills.sort(key=self._rank)
        shares = PrefillShares(prefills, tokens, contended=False, outranked=False)
        if admit:
            self._admit(step, shares, prefills)
        for request, count in shares.settle():
            step.prefill(request, count)


class PrefillFirstScheduler(FirstComeScheduler):
    """As long as a prompt can be computed, nothing else is: decode rows wait."""

    _decodes_wait = False

    def plan(self) -> PlannedStep | None:
        self._decodes_wait = True
        try:
            planned = super().plan()
        finally:
            self._decodes_wait = False
        return super().plan() if planned is None else planned

    def _wanting(self) -> tuple[list[Request], list[Request]]:
        decodes, prefills = super()._wanting()
        return ([] if self._decodes_wait else decodes), prefills


@dataclass(frozen=True)
class Policy:
    """``in_order``: a request that does not fit is overtaken by none. ``step_time`` is to learn from the steps."""

    name: str
    budget: Budget
    scheduler: type[Scheduler] = Scheduler
    in_order: bool = False
    step_time: LearningStepTime | None = None

    def build(self, kv: KVCache, *, max_num_seqs: int, max_model_len: int) -> Scheduler:
        """A scheduler that follows the policy, over ``kv``. Raises `ConfigError`."""
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        if self.in_order:
            config = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_passes=0)
        return self.scheduler(config, kv, self.budget)


def find_policy(name: str, device_budget: Callable[[StepTime], Budget], prior: FittedStepTime) -> Policy:
    """The policy of that name. ``device_budget`` makes the device's own budget, of a model of step times that begins at
    ``prior``. Raises `ConfigError`."""
    if name == DEFAULT:
        step_time = LearningStepTime(prior)
        return Policy(name, device_budget(step_time), step_time=step_time)
    if name in FCFS_TOTALS:
        # Prompts have what the decode rows leave, and half of a step at least, which is more than they leave only with
        # more rows than half of a step. Rows are counted as the device pads them, or its padding would push each step
        # to the next size, which no engine would stand for.
        levels = ((0, FCFS_TOTALS[name]),)
        padded = GRAPH_SIZES.mixed_rows
        return Policy(name, StepTotal(levels, levels, padded), FirstComeScheduler, in_order=True)
    if name == PREFILL_FIRST:
        # The scheduler asks for prompt tokens beside decode rows only when no prompt can be computed.
        return Policy(name, TokenCap(PREFILL_FIRST_TOKENS, 1), PrefillFirstScheduler, in_order=True)
    raise ConfigError(f"{name!r:.80} is no policy: known are {', '.join(POLICY_NAMES)}")
