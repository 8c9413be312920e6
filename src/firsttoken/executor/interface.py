"""The executor as the engine sees it: submit a plan, get a handle, read the result later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from firsttoken.core.plan import StepPlan, StepResult
from firsttoken.grammar.grammars import Grammars
from firsttoken.kvcache.copy import CopyEngine
from firsttoken.kvcache.host import HostMemory

MAIN_LANE = "main"


class StepHandle(Protocol):
    """One submitted step."""

    def done(self) -> bool:
        """True when `result` would not wait."""

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step and return what it produced; raises what the step raised, or `TimeoutError`."""


class Executor(Protocol):
    """Steps submitted to one lane run in the order of submission; several may be in flight. A token that a step
    chooses is read on the device by the steps after it, so the caller may submit the next step before it has seen
    the result of this one."""

    lanes: tuple[str, ...]

    def submit(self, plan: StepPlan, lane: str = MAIN_LANE) -> StepHandle: ...

    def settle(self) -> None:
        """Called when all results that were read have been told: launch what is still to be launched of submitted
        steps. Of rows that are held to grammars a token is chosen when the one before is known, and waits here for the
        mask after it, while the device computes. Later calls do the same when they must."""
        ...

    def idle(self) -> bool:
        """Called when nothing is to be computed: do a little of what may be done ahead (tens of milliseconds at most).
        True when more of it is left."""
        ...

    @property
    def unprepared(self) -> int:
        """Kinds of steps that `idle` has still to prepare."""
        ...

    def copies(self, host: HostMemory | None = None, *, may_grow: Callable[[], bool] = lambda: True) -> CopyEngine:
        """What moves KV blocks between the pools ``device``, this executor's KV, and ``host``, which is opened here and
        grows while it ``may_grow`` (`HostMemory.open`). Ask once; `close` closes it, and the host memory is the
        caller's to close after that. Raises `RuntimeError` when asked again."""
        ...

    def hold_to(self, grammars: Grammars) -> None:
        """Whose answers rows with a grammar are held to; told before such a row starts."""
        ...

    def close(self) -> None:
        """Finish what was submitted and free the device."""
