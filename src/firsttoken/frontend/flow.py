"""Deltas told on where they arrive.

To wake a task for each token costs more than all that is done for it: a future, a turn of the loop, and a way down
through every coroutine that waits for another. So who tells deltas on gives a function, and his task is woken only for
what has to be awaited: a beginning, an end, a reader who is slower than the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from firsttoken.core.errors import InvalidRequest, ReaderTooSlow
from firsttoken.frontend.answer import Delta
from firsttoken.frontend.consumer import Rest
from firsttoken.frontend.generation import Generation

# Bytes of tokens that may wait for one caller, beside what his connection holds: some 10,000 tokens, or 2,000 with 20
# log-probabilities each.
MOST_WAITING = 4 << 20

Tell = Callable[[Delta], Rest]
Renamed = Callable[[InvalidRequest], InvalidRequest]
Source = tuple[Generation, Tell, Renamed]
"""``Renamed`` says what is wrong with a request in its caller's words."""


async def flow(*sources: Source) -> None:
    """Give every delta of these generations to its function, until all their answers have ended.

    A function is called within the delivery of the engine's message, and must be quick. While what it returned is
    awaited, in the task that called this, nothing is told of any source: deltas pile up and are merged, as they are
    for whoever iterates over a `Generation` and is slow. The same goes for what had arrived before. Where more than
    `MOST_WAITING` bytes pile up, all their answers end.

    Raises what a function raises, what the iteration over a `Generation` does, and `ReaderTooSlow`.
    """
    await _Flow(sources).run()


class _Flow:
    """Invariant: something is told only by who has set ``busy``, and the task waits only while it is not set or has
    been handed something to do."""

    __slots__ = ("_error", "_rest", "_streams", "_waiter", "busy")

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._streams = [_Stream(self, *source) for source in sources]
        self.busy = True
        self._waiter: asyncio.Future[None] | None = None
        self._rest: tuple[Coroutine[Any, Any, None], Generation] | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        attached: list[Generation] = []
        try:
            for stream in self._streams:
                stream.generation.attach(stream)
                attached.append(stream.generation)
            while True:
                for stream in self._streams:
                    await stream.catch_up()
                if not any(generation.unfinished for generation in attached):
                    return
                # While one was caught up with, something may have come for another.
                if not any(generation.due for generation in attached):
                    await self._wait()
        finally:
            self.busy = True
            self._streams = []  # they know this object: nothing is to be left for the collector
            for generation in attached:
                generation.detach()
            if self._rest is not None:
                self._rest[0].close()

    async def _wait(self) -> None:
        """Until there is something that a stream could not do itself."""
        self._waiter = asyncio.get_running_loop().create_future()
        self.busy = False
        await self._waiter
        if self._error is not None:
            raise self._error
        if self._rest is not None:
            (rest, generation), self._rest = self._rest, None
            await rest
            generation.passed_on()

    def bound(self) -> None:
        """Something has arrived for a caller who has yet to take what came before. Where too much waits for him he is
        told no more of it: his task learns why when it goes on, if he ever lets it."""
        waiting = sum([_waiting_bytes(stream.generation) for stream in self._streams])
        if waiting > MOST_WAITING:
            for stream in [one for one in self._streams if one.generation.unfinished]:
                stream.generation.give_up(
                    ReaderTooSlow(
                        f"the caller reads too slowly: some {waiting >> 20} MiB of tokens waited for him, and "
                        f"{MOST_WAITING >> 20} are the most; read faster, or ask for fewer log-probabilities"
                    )
                )

    def hand_over(
        self, rest: Rest = None, generation: Generation | None = None, error: Exception | None = None
    ) -> None:
        """The task goes on from here. It has not looked yet at what it was handed before, if it is busy."""
        self.busy = True
        if rest is not None:
            assert generation is not None
            self._rest = rest, generation
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _waiting_bytes(generation: Generation) -> int:
    """About: a token takes 430 bytes, its log-probabilities 200 and 72 for each alternative (tracemalloc's count)."""
    count = generation.params.logprobs
    return generation.waiting * (430 + (0 if count is None else 200 + 72 * count))


class _Stream:
    """One source; told by its generation of arrivals."""

    __slots__ = ("_renamed", "flow", "generation", "tell")

    def __init__(self, flow: _Flow, generation: Generation, tell: Tell, renamed: Renamed) -> None:
        self.flow = flow
        self.generation = generation
        self.tell = tell
        self._renamed = renamed

    def arrived(self) -> None:
        flow = self.flow
        if flow.busy:
            flow.bound()
            return
        flow.busy = True
        generation = self.generation
        rest = None
        try:
            delta = generation.take()
            if delta is not None:
                rest = self.tell(delta)
        except Exception as error:  # the task's to raise: it is not the engine's link that is at fault
            flow.hand_over(error=error)
            return
        if rest is not None or generation.more or generation.ending:
            flow.hand_over(rest, generation)
        else:
            generation.passed_on()
            flow.busy = False

    def wake(self) -> None:
        if not self.flow.busy:
            self.flow.hand_over()

    async def catch_up(self) -> None:
        """All that is there, in the task."""
        generation = self.generation
        while True:
            try:
                delta = generation.take()
            except InvalidRequest as error:
                raise self._renamed(error) from None
            if delta is None:
                return
            rest = self.tell(delta)
            if rest is not None:
                await rest
            generation.passed_on()
            if generation.behind:
                await asyncio.sleep(0)  # the others' turn
