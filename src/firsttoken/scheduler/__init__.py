"""Who computes how many tokens in each step: queues, budget, preemption, the plan. Torch-free."""

from firsttoken.scheduler.budget import Budget, StepTotal, TokenCap
from firsttoken.scheduler.config import SchedulerConfig
from firsttoken.scheduler.scheduler import Scheduler
from firsttoken.scheduler.step import Counters, PlannedStep, Update

__all__ = ["Budget", "Counters", "PlannedStep", "Scheduler", "SchedulerConfig", "StepTotal", "TokenCap", "Update"]
