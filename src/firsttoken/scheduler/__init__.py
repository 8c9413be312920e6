"""Who computes how many tokens in each step: queues, budget, preemption, the plan. Torch-free."""

from firsttoken.scheduler.budget import Budget, TimeBudget, TokenCap
from firsttoken.scheduler.config import SchedulerConfig
from firsttoken.scheduler.scheduler import Scheduler
from firsttoken.scheduler.shares import PromptOrder
from firsttoken.scheduler.step import Counters, PlannedStep, Update
from firsttoken.scheduler.step_time import StepLoad, StepTime

__all__ = [
    "Budget",
    "Counters",
    "PlannedStep",
    "PromptOrder",
    "Scheduler",
    "SchedulerConfig",
    "StepLoad",
    "StepTime",
    "TimeBudget",
    "TokenCap",
    "Update",
]
