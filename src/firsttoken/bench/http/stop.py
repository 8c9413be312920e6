"""Why a load ends before its time: somebody wants it to, or the server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator

from firsttoken.bench.http.pool import NO_CONNECTION
from firsttoken.bench.http.server import Answered

INTERRUPTED = "interrupted"
# So many requests in a row, over so long, that got no connection: a server that restarts or is full for a moment is
# measured on.
GONE_REQUESTS, GONE_S = 10, 3.0


class Stop:
    """``reason`` is None until the load is to end; `wait` returns then."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._told = asyncio.Event()
        self._without = 0
        self._since = 0.0

    @property
    def is_interrupted(self) -> bool:
        return self.reason == INTERRUPTED

    def saw(self, answered: Answered) -> None:
        """Count a request that has ended."""
        if answered.error is None or not answered.error.startswith(NO_CONNECTION):
            self._without = 0
            return
        if self._without == 0:
            self._since = time.monotonic()
        self._without += 1
        silent_s = time.monotonic() - self._since
        if self._without >= GONE_REQUESTS and silent_s >= GONE_S:
            self._end(f"the server is gone: {self._without} requests got no connection in {silent_s:.0f} s")

    async def wait(self) -> None:
        await self._told.wait()

    def _end(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self._told.set()

    @contextlib.contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C ends the load, and what was measured is told; the second ends the command as ever."""
        loop = asyncio.get_running_loop()

        def interrupted() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            self._end(INTERRUPTED)

        try:
            loop.add_signal_handler(signal.SIGINT, interrupted)
        except (NotImplementedError, RuntimeError, ValueError):  # no such thing here, or not the main thread
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


async def until_done(stop: Stop, sending: asyncio.Task[None]) -> None:
    """Wait for a task that sends, and cancel it when the load is to end before. Raises what it raised."""
    ended = asyncio.create_task(stop.wait())
    await asyncio.wait({sending, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not sending.done():
        sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
