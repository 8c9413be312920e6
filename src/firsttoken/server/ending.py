"""How a serving process ends: it drains on the first signal, stops on the second, and when it has lost its engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from firsttoken.core.clock import NS_PER_S, now_ns

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.server.app import FirstTokenApp

logger = logging.getLogger(__name__)

_POLL_S = 0.01
# While it drains it says what is left: when that has changed, but not more often than this; and at least so often.
TELL_S, TELL_ANYWAY_S = 1.0, 5.0
# What calls get to tell their callers that the engine is gone.
LOST_S = 2.0


class Ending:
    """``stop`` ends the server once nothing is left to do; ``begins`` hears that it will. `exit_code` is 1 when
    requests were cut off, or the engine was lost."""

    def __init__(
        self,
        llm: AsyncLLM,
        app: FirstTokenApp,
        stop: Callable[[], None],
        drain_s: float,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._llm = llm
        self._live = app.live
        self._dashboard = app.dashboard
        self._stop_server = stop
        self._begins = begins
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None
        self._stopped = False
        self._failed = False

    @property
    def exit_code(self) -> int:
        return 1 if self._failed else 0

    def on_signal(self) -> None:
        if self._draining is None:
            self._begins()
            logger.warning(
                "draining: %s, up to %g s; a second signal stops at once", self._running("running"), self._drain_s
            )
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._stop(asked=True)

    async def watch_engine(self) -> None:
        """End the server when there is no engine any more, so that whatever started it can do so again."""
        why = await self._llm.lost()
        logger.error("%s; the server ends", why)
        self._begins()
        self._failed = True
        until = now_ns() + int(LOST_S * NS_PER_S)
        await self._until_quiet(until)
        self._stop(asked=False)

    async def _drain(self) -> None:
        deadline_ns = now_ns() + int(self._drain_s * NS_PER_S)
        telling = asyncio.create_task(self._tell())
        try:
            await self._llm.drain(self._drain_s)
            # The engine is done with them; their last bytes may still be on the way.
            await self._until_quiet(deadline_ns)
        finally:
            telling.cancel()
        self._stop(asked=False)

    async def _until_quiet(self, deadline_ns: int) -> None:
        while len(self._live) and now_ns() < deadline_ns:  # noqa: ASYNC110  # at most twice in a process
            await asyncio.sleep(_POLL_S)

    async def _tell(self) -> None:
        told, told_ns = len(self._live), now_ns()
        while True:
            await asyncio.sleep(TELL_S)
            left, now = len(self._live), now_ns()
            if left != told or now - told_ns >= TELL_ANYWAY_S * NS_PER_S:
                told, told_ns = left, now
                logger.warning("draining: %s, %.0f s left", self._running("still running"), self._llm.drain_left_s)

    def _running(self, how: str) -> str:
        count = len(self._live)
        return f"{count} request{'' if count == 1 else 's'} {how}"

    def _stop(self, *, asked: bool) -> None:
        """End what still runs and say so: always when a signal asked for it, else only if something did."""
        if self._stopped:
            return
        self._stopped = True
        cut = self._live.end_all()
        self._failed = self._failed or bool(cut)
        self._dashboard.close()
        if asked or cut:
            logger.warning("stopped: %s ended early", "1 request was" if cut == 1 else f"{cut} requests were")
        self._stop_server()
