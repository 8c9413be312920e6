"""A step that was submitted, and what is its own until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.core.plan import StepResult
from firsttoken.executor.graphs.held import HeldRows
from firsttoken.executor.graphs.rows import Staging
from firsttoken.executor.graphs.runtime import Event


@dataclass(frozen=True, slots=True)
class Place:
    """What belongs to one place of the ring; used again when its step has ended."""

    staging: Staging
    end: Event


class StepInFlight:
    """A submitted step, as `executor.interface.StepHandle`."""

    __slots__ = ("_place", "_read", "_result", "held")

    def __init__(self, place: Place, read: Callable[[], StepResult], held: HeldRows | None = None) -> None:
        self.held = held
        self._place = place
        self._read = read
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self._place.end.query()

    def result(self, timeout: float | None = None) -> StepResult:
        """Waits for the device without the interpreter's lock; ``timeout`` is not kept (a step takes milliseconds)."""
        if self._result is None:
            self._result = self._read()
        return self._result
