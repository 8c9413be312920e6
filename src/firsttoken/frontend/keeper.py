"""The engine behind a front end, through all its lives: started, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.errors import EngineDead, EngineRestarting, FirstTokenError
from firsttoken.core.step_record import StepRecord
from firsttoken.frontend.link import EngineLink
from firsttoken.frontend.restarts import RestartPolicy, Restarts
from firsttoken.observability.flight import FlightRecorder
from firsttoken.observability.health import STUCK_AFTER_S, Health, Progress
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.observability.step_history import StepHistory
from firsttoken.transport.channel import EngineHandle
from firsttoken.transport.messages import EngineInfo, EngineStats

log = logging.getLogger(__name__)

Launch = Callable[[], EngineHandle]

# How often the engine's process is looked at, besides its channel: bounds how long a silent death can go unseen.
WATCH_S = 0.3
STOP_S = 5.0
STOP_STARTING_S = 0.1
# What an engine that is dead to us gets to leave by itself: one that failed may be giving its device's memory back.
STOP_DEAD_S = 0.9


class EngineKeeper:
    """Everything of one event loop. ``launch`` starts an engine (in a thread, as it may take long); None where there is
    nothing to start it by. ``on_ready`` is told what a new engine said of itself, before it gets any request.

    Whoever asks while there is none gets `EngineRestarting`, or `EngineDead` where none will come.
    """

    def __init__(
        self,
        metrics: FrontendMetrics,
        steps: StepHistory,
        flight: FlightRecorder,
        launch: Launch | None,
        policy: RestartPolicy,
    ) -> None:
        self.launch = launch
        self.link: EngineLink | None = None
        self.info: EngineInfo | None = None  # of the latest that was ready
        self.restarts = 0  # that succeeded
        self.lost: asyncio.Event = asyncio.Event()  # there is none, and none will come
        self.idle = asyncio.Event()  # no request is left
        self.on_ready: Callable[[EngineInfo], None] = _nothing
        self._policy = policy
        self._attempts = Restarts(policy)
        self._metrics, self._steps, self._flight = metrics, steps, flight
        self._progress = self._new_progress()
        self._first_step = 0  # is added to the numbers of its steps
        self._took_ns = 0  # the last start
        self._back_ns = 0  # when the next engine is expected
        self._died: EngineDead | None = None  # the last that did, and why
        self._restarting: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._staying = True  # one that dies is started again

    # -------------------------------------------------------------------- its life

    def take(self, handle: EngineHandle) -> None:
        """The engine that was started already."""
        self.link = EngineLink(handle)

    async def launched(self) -> None:
        """Launch it unless it was taken."""
        if self.link is None:
            if self.launch is None:
                raise RuntimeError("AsyncLLM needs a started engine's handle: use AsyncLLM.launch(EngineArgs(...))")
            self.link = EngineLink(await _launched(self.launch))

    async def start(self) -> None:
        """Wait until what was launched is ready. Raises what its start failed by."""
        assert self.link is not None
        await self._connect(self.link)

    async def _connect(self, link: EngineLink) -> None:
        began = now_ns()
        link.on_stats, link.on_idle, link.on_steps = self._on_stats, self.idle.set, self._on_steps
        link.on_kv, link.flight = self._metrics.update_kv, self._flight
        link.on_dead, link.back_in_s = self._on_dead, self._back_in_s
        self.idle.set()
        link.listen()
        self._watch = asyncio.create_task(self._watch_engine(link))
        if link.handle.pid is not None:
            self._metrics.watch_engine_process(link.handle.pid)
        info = await asyncio.wrap_future(link.ready)
        self._took_ns = now_ns() - began
        self._progress = self._new_progress()
        again = self.info is not None
        self.info = self._flight.info = info
        self.on_ready(info)
        if link.error is None:
            self._metrics.engine_up(again=again)

    async def stop(self, *, started: bool) -> None:
        """End it, whatever it does, and do not start it again. Requests that run raise `EngineDead`."""
        self.stay_away()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._watch is not None:
            self._watch.cancel()
        if self.link is not None:
            # An engine that is still starting does not look at its messages, and has nothing to finish.
            await asyncio.to_thread(self.link.handle.stop, STOP_S if started else STOP_STARTING_S)

    def stay_away(self) -> None:
        """From now on one that dies is not started again."""
        self._staying = False

    # ---------------------------------------------------------------- what is asked

    def living(self) -> EngineLink:
        """The link to an engine that takes requests. Raises `EngineRestarting`, `EngineDead`."""
        if self.link is None or self.info is None:
            raise RuntimeError("AsyncLLM is not started: await its start() first")
        if self._restarting is not None:
            left = max(self._back_ns - now_ns(), 0) / NS_PER_S
            raise EngineRestarting(str(self._died), max(1, math.ceil(left)))
        if self.link.error is not None:
            raise EngineDead(str(self.link.error))
        return self.link

    @property
    def restarting(self) -> bool:
        return self._restarting is not None

    @property
    def error(self) -> EngineDead | None:
        """Why there is no engine; None while there is one."""
        try:
            self.living()
        except EngineDead as error:
            return error
        return None

    def submitted(self) -> None:
        """Work was sent to it."""
        self.idle.clear()
        self._progress.submitted(now_ns())

    def progress(self) -> Health:
        """Whether it is idle, busy, stuck, dead or being started again."""
        return self._progress.check(now_ns(), restarting=self.restarting, restarts=self.restarts)

    # -------------------------------------------------------------- what it tells

    def _on_stats(self, stats: EngineStats) -> None:
        self._metrics.update(stats)
        self._progress.update(stats)

    def _on_steps(self, records: Sequence[StepRecord]) -> None:
        if self._first_step:  # numbers go on where those of the engine before ended
            first = self._first_step
            records = [msgspec.structs.replace(one, step_id=one.step_id + first) for one in records]
        self._steps.add(records)
        self._metrics.take_steps(records)

    def _back_in_s(self) -> int | None:
        """Asked at a death: after how many seconds another engine should be there; None for never."""
        if not self._staying or self.info is None or self.launch is None:
            return None
        pause = self._attempts.pause_s(now_ns())
        return None if pause is None else max(1, math.ceil(pause + self._took_ns / NS_PER_S))

    def _on_dead(self) -> None:
        assert self.link is not None
        self._died = self.link.error
        self._progress.gone()
        self._metrics.engine_gone(died=self._staying and self.info is not None)
        last = self._steps.last(1)
        self._first_step = last[0].step_id if last else 0
        if self._restarting is not None:
            return  # it is that task which waits for this one
        if self._back_in_s() is not None:
            self._restarting = asyncio.get_running_loop().create_task(self._restart())
        elif self.info is not None:
            self.lost.set()

    # ------------------------------------------------------------------- restarts

    async def _restart(self) -> None:
        """Try until there is an engine again, or there were too many attempts."""
        try:
            while self._staying and (pause := self._attempts.pause_s(now_ns())) is not None:
                self._attempts.begin(now_ns())
                if await self._attempt(pause):
                    return
            if not self._staying:
                return
        except Exception:
            log.exception("the engine could not be started again")
        else:
            log.error(
                "the engine is not started again: %d restarts within %g s are the most (--engine-restarts)",
                self._policy.limit,
                self._policy.within_s,
            )
        finally:
            self._restarting = None
        self.lost.set()

    async def _attempt(self, pause: float) -> bool:
        assert self.link is not None
        assert self.launch is not None
        began = now_ns()
        self._back_ns = began + int(pause * NS_PER_S) + self._took_ns
        log.warning("the engine is started again%s", f" in {pause:g} s" if pause else "")
        # It may live, if it does not answer; and of a device's memory there is no room for two.
        await asyncio.to_thread(self.link.handle.stop, STOP_DEAD_S)
        await asyncio.sleep(pause)
        try:
            link = EngineLink(await _launched(self.launch))
            self.link = link
            await self._connect(link)
        except (FirstTokenError, OSError) as error:
            if self._staying:
                log.error("the engine could not be started again: %s", error)
            return False
        if link.error is not None:  # it was ready, and died at once
            return False
        self.restarts += 1
        took = (now_ns() - began) / NS_PER_S
        self._flight.event("engine started again", f"after {took:.2f} s")
        log.warning("the engine is ready again after %.1f s (restart %d of this server)", took, self.restarts)
        return True

    async def _watch_engine(self, link: EngineLink) -> None:
        silent = 0
        while link.error is None:
            await asyncio.sleep(WATCH_S)
            link.check()
            # Twice in a row: when it is this process that was held up, what the engine said meanwhile is read first.
            silent = silent + 1 if link.ready.done() and self._progress.check(now_ns()).state == "dead" else 0
            if silent > 1:
                link.fail(f"it hangs: nothing was heard of it, or no step ended, for {self._policy.hung_after_s:g} s")

    def _new_progress(self) -> Progress:
        dead_after_s = self._policy.hung_after_s
        return Progress(now_ns(), stuck_after_s=min(STUCK_AFTER_S, dead_after_s), dead_after_s=dead_after_s)


async def _launched(launch: Launch) -> EngineHandle:
    """Whoever waits may be cancelled: then nobody would know of the engine."""
    launching = asyncio.ensure_future(asyncio.to_thread(launch))
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        handle = await launching
        await asyncio.to_thread(handle.stop, STOP_STARTING_S)
        raise


def _nothing(_: object) -> None:
    """The default of a callback."""
