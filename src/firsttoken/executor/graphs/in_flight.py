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
    """A submitted step, as `executor.interface.StepHandle`. ``rest`` is what has still to be launched of it, by
    `launch_rest`; ``held`` are the rows that it is for."""

    __slots__ = ("_place", "_read", "_rest", "_result", "held")

    def __init__(
        self,
        place: Place,
        read: Callable[[], StepResult],
        held: HeldRows | None = None,
        rest: Callable[[], None] | None = None,
    ) -> None:
        self.held = held
        self._rest = rest
        self._place = place
        self._read = read
        self._result: StepResult | None = None

    def launch_rest(self) -> None:
        """Once; what it raises is the step's failure."""
        rest, self._rest = self._rest, None
        if rest is not None:
            try:
                rest()
            finally:
                self._place.end.record()

    def done(self) -> bool:
        return self._result is not None or (self._rest is None and self._place.end.query())

    def result(self, timeout: float | None = None) -> StepResult:
        """Waits for the device without the interpreter's lock; ``timeout`` is not kept (a step takes milliseconds)."""
        if self._result is None:
            self.launch_rest()
            self._result = self._read()
        return self._result
