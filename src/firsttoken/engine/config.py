"""The engine's configuration with every "auto" resolved."""

from __future__ import annotations

from dataclasses import dataclass, field

from firsttoken.engine.host_clock import HostClock
from firsttoken.executor.config import ExecutorConfig
from firsttoken.kvcache.disk import DiskConfig
from firsttoken.kvcache.eviction import DEFAULT_POLICY
from firsttoken.scheduler.budget import Budget
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.window import BatchWindow


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """``in_flight`` steps may be submitted before the oldest one's result is read; ``budget`` decides the prompt tokens
    of each, ``step_time`` learns what they take. ``window`` holds prompts back, None for never; ``host`` measures the
    loop, for it among others. ``host_blocks`` of host memory keep KV that the device evicts, and files by ``disk`` what
    passes through those; ``eviction`` is the policy of each of them."""

    model: str
    executor: ExecutorConfig
    prefix_caching: bool
    budget: Budget
    step_time: LearningStepTime
    in_flight: int
    window: BatchWindow | None = None
    host_blocks: int = 0
    disk: DiskConfig | None = None
    eviction: str = DEFAULT_POLICY
    host: HostClock = field(default_factory=HostClock)
