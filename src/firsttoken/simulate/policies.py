"""The scheduling policies that can be compared: the engine's own, and what other engines do.

A policy is a `Budget`, a `PromptOrder` and whether requests may overtake: all that a scheduler is told anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from firsttoken.core.errors import ConfigError
from firsttoken.core.service import Targets
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import (
    Budget,
    PromptOrder,
    Scheduler,
    SchedulerConfig,
    TokenCap,
)
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_time import FittedStepTime, StepTime
from firsttoken.scheduler.window import BatchWindow
from firsttoken.simulate.step_total import StepTotal

DEFAULT = "default"
PREFILL_FIRST = "prefill-first"
# Token rows of a step, decode rows included.
FCFS_TOTALS = {f"fcfs-{total}": total for total in (512, 2048, 8192)}
PREFILL_FIRST_TOKENS = 8192
_TARGETS = Targets()

POLICY_NAMES = (DEFAULT, *FCFS_TOTALS, PREFILL_FIRST)


@dataclass(frozen=True)
class Policy:
    """``in_order``: a request that does not fit is overtaken by none. ``step_time`` is to learn from the steps."""

    name: str
    budget: Budget
    order: PromptOrder = field(default_factory=PromptOrder)
    in_order: bool = False
    step_time: LearningStepTime | None = None

    def build(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        targets: Targets = _TARGETS,
        window: BatchWindow | None = None,
    ) -> Scheduler:
        """A scheduler that follows the policy, over ``kv``. Raises `ConfigError`."""
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        if self.in_order:
            config = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_passes=0)
        return Scheduler(config, kv, self.budget, self.order, targets, window)


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
        budget = StepTotal(FCFS_TOTALS[name], GRAPH_SIZES.mixed_rows)
        return Policy(name, budget, PromptOrder(0), in_order=True)
    if name == PREFILL_FIRST:
        # The scheduler asks for prompt tokens beside decode rows only when no prompt can be computed.
        return Policy(name, TokenCap(PREFILL_FIRST_TOKENS, 1), PromptOrder(0, decodes_wait=True), in_order=True)
    raise ConfigError(f"{name!r:.80} is no policy: known are {', '.join(POLICY_NAMES)}")
