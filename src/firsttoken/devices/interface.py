"""The interface of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.step_sizes import StepSizes
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import Executor
from firsttoken.scheduler.budget import Budget
from firsttoken.scheduler.step_prior import Roof
from firsttoken.scheduler.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """As found now: ``name`` as its vendor calls it, memory in bytes, ``threads`` of the host that may compute."""

    name: str
    free_memory: int
    total_memory: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class WeightChoice:
    """How weights are kept and computed with, and why it is so (for the log)."""

    quantization: str
    dtype: str
    why: str


@dataclass(frozen=True, kw_only=True)
class DevicePolicy:
    """Defaults that follow from how the device works.

    ``kv_share`` of the memory that weights and work space leave goes to the KV cache, at most ``kv_limit`` bytes (None:
    no limit). ``budget`` makes what decides the prompt tokens of each step, of a model of step times that
    begins at ``roof`` and ``sizes``, what steps are padded to. ``in_flight`` is as in `EngineConfig`.
    ``fixed_memory`` bytes are kept for what the device's libraries take.
    ``rounded``: formats of a file's weights that are computed with as they are stored.
    ``max_in_flight`` steps can be submitted without waiting. ``deterministic``: `EngineArgs.deterministic` can be
    honoured. ``row_gain``: by ``quantization``, how many times as fast a step of few rows is, where prompts are not.
    """

    kv_share: float
    kv_limit: int | None
    fixed_memory: int
    budget: Callable[[StepTime], Budget]
    roof: Roof
    sizes: StepSizes
    in_flight: int
    max_in_flight: int = 64
    deterministic: bool = False
    row_gain: Mapping[str, float] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()


class Device(Protocol):
    """One kind of device. Cheap to make: nothing is set up before `load`."""

    @property
    def kind(self) -> str:
        """What ``--device`` calls it."""
        ...

    @property
    def policy(self) -> DevicePolicy: ...

    def refusal(self) -> str | None:
        """Why no engine can run on it here and what to do, None when one can."""
        ...

    def facts(self) -> DeviceFacts:
        """Read now; only for a device without a `refusal`."""
        ...

    def choose_weights(self, quantization: str, dtype: str) -> WeightChoice:
        """Resolve "auto" in either. Raises `ConfigError` for a value or a pair that cannot be honoured."""
        ...

    def begin(self) -> None:
        """An engine starts that may run here: begin what can go on beside its imports, in processes of its own or on
        threads that leave Python alone. Called before torch is imported, and not always."""
        ...

    def end(self) -> None:
        """The engine has loaded, here or elsewhere, or failed to: give up what `begin` began, unless `load` took it."""
        ...

    def load(
        self, config: ExecutorConfig, checkpoint: Checkpoint, close: Callable[[str], None] | None = None
    ) -> Executor:
        """Load the weights and make everything ready to run. ``close`` is told the name of each part that has ended,
        for the account of the start; the last is "weights" where it is not told. Raises `CheckpointError`, and
        `ConfigError` when memory does not suffice."""
        ...
