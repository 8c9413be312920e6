"""The engine's configuration with every "auto" resolved."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.executor.config import ExecutorConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """``in_flight`` steps may be submitted before the oldest one's result is read; ``prefill_tokens`` caps the prompt
    tokens of a step without decode rows, ``mixed_prefill_tokens`` of a step with one decode row, and each further row
    adds ``mixed_prefill_per_row``, each waiting request ``mixed_prefill_per_waiting``."""

    model: str
    executor: ExecutorConfig
    prefix_caching: bool
    prefill_tokens: int
    mixed_prefill_tokens: int
    mixed_prefill_per_row: int
    mixed_prefill_per_waiting: int
    in_flight: int
