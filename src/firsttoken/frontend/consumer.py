"""What a generation knows of who takes its deltas without iterating over it, as `frontend.flow` does."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken.frontend.answer import Delta

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Generation

Rest = Coroutine[Any, Any, None] | None
"""What is left to be awaited before anything more may be told."""


class Turn(Protocol):
    """Of deltas of one or more generations that go to one caller, one at a time."""

    busy: bool  # one is being told, or others wait for theirs: nothing else may be told

    def hand_over(
        self, rest: Rest = None, generation: Generation | None = None, error: Exception | None = None
    ) -> None:
        """Who was busy leaves something to be awaited, all that is left to be done of an end, or an error to be
        raised."""


class Consumer(Protocol):
    """Is told by its generation of arrivals."""

    @property
    def flow(self) -> Turn:
        """Whose turn it is."""

    @property
    def tell(self) -> Callable[[Delta], Rest]:
        """Takes a delta. It may be called by who has set ``flow.busy``, and hands over what is not done by then."""

    def arrived(self) -> None:
        """There is something to take, and this is the time to do it."""

    def wake(self) -> None:
        """There is something to take, or the end has come, and others may have to be told before."""
