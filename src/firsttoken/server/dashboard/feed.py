"""The live feed: one look at the engine for all who listen, none when nobody does."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.server.dashboard.snapshot import Snapshots, request_line
from firsttoken.server.dashboard.steps import FIELDS, MAX_BARS, bars
from firsttoken.server.errors import ApiError, unavailable

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.observability.recent import EndedRequest

MAX_HZ = 10.0
MIN_HZ = 0.1
DEFAULT_HZ = 5.0
MAX_LISTENERS = 64
# The cache's totals change with every prompt, and nobody sees that at ten a second.
KV_EVERY_NS = NS_PER_S
# What a picture that has just been opened begins with.
FIRST_STEPS = 1000
FIRST_REQUESTS = 50
# What is kept for a listener that reads slower than the ticks come.
KEPT_TICKS = 64
KEPT_REQUESTS = 128

_encode = msgspec.json.encode
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tick:
    number: int
    common: bytes  # a JSON object, without the brace that closes it
    steps: bytes  # rows of bars, without brackets; "" for none


@dataclass(frozen=True, slots=True)
class _Ended:
    number: int
    tenant: str
    line: bytes


class Listener:
    """One who reads the feed, ``hz`` times a second at most; ``tenant`` None sees everybody's requests."""

    __slots__ = ("closed", "due_ns", "gap_ns", "kv", "request", "tenant", "tick", "waiter")

    def __init__(self, hz: float, tenant: str | None) -> None:
        self.gap_ns = round(NS_PER_S / hz)
        self.tenant = tenant
        self.due_ns = 0
        self.tick = 0  # the last one that it was told
        self.request = 0
        self.kv = 0
        self.closed = False
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def close(self) -> None:
        """It has left, or is to leave."""
        self.closed = True
        self.wake()


class Feed:
    """The ticks of one server, on its event loop. The ticking task lives while there are listeners."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._snapshots = Snapshots(llm)
        self._listeners: set[Listener] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._ticks: deque[_Tick] = deque(maxlen=KEPT_TICKS)
        self._ended: deque[_Ended] = deque(maxlen=KEPT_REQUESTS)
        self._number = self._ended_number = 0
        self._step_id = -1
        self._kv = b"null"
        self._kv_number = 0
        self._kv_ns = 0
        self._stopped = False
        self._unsubscribe: Callable[[], None] = _nothing

    def close(self) -> None:
        """End all streams: the server stops."""
        self._stopped = True
        for listener in list(self._listeners):
            listener.close()

    async def frames(self, listener: Listener) -> AsyncGenerator[bytes, None]:
        """JSON objects, the first at once, until ``listener`` is closed. A reader that comes late is told the present,
        and the steps and requests that it missed. Raises `ApiError` 503 where there are too many."""
        self._join(listener)
        try:
            yield self._first(listener)
            while not listener.closed:
                if self._ticks and self._ticks[-1].number > listener.tick and now_ns() >= listener.due_ns:
                    yield self._frame(listener)
                else:
                    listener.waiter = asyncio.get_running_loop().create_future()
                    await listener.waiter
        finally:
            self._leave(listener)

    # -------------------------------------------------------------------- listeners

    def _join(self, listener: Listener) -> None:
        if self._stopped:
            raise unavailable("The server is stopping.", "server_stopping")
        if len(self._listeners) >= MAX_LISTENERS:
            raise _crowded()
        if self._ticking is None:
            self._step_id = self._last_step()
            self._ticks.clear()
            self._tick()
            self._unsubscribe = self._llm.recent.subscribe(self._note_end)
        else:
            self._tick()
            self._ticking.cancel()  # at the others' pace, which may be slower
        self._listeners.add(listener)
        self._ticking = asyncio.get_running_loop().create_task(self._run())

    def _leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
            self._unsubscribe()

    async def _run(self) -> None:
        due = now_ns()
        while True:
            # Not behind: after a pause of the loop the ticks that were missed are not made up for.
            due = max(due + min(one.gap_ns for one in self._listeners), now_ns())
            await asyncio.sleep((due - now_ns()) / NS_PER_S)
            try:
                self._tick()
            except Exception:
                # They come back, and hear that it fails; to go on without ticks would tell them nothing.
                log.exception("the picture for the dashboard could not be made")
                for listener in self._listeners:
                    listener.close()
                return

    # ------------------------------------------------------------------------ ticks

    def _tick(self) -> None:
        self._number += 1
        now = now_ns()
        if now - self._kv_ns >= KV_EVERY_NS:
            self._kv_ns = now
            kv = self._snapshots.kv()
            if kv is not None and (encoded := _encode(kv)) != self._kv:
                self._kv, self._kv_number = encoded, self._kv_number + 1
        fresh = self._llm.steps.since(self._step_id)
        if fresh:
            self._step_id = fresh[-1].step_id
        self._ticks.append(_Tick(self._number, _encode(self._snapshots.now())[:-1], _encode(bars(fresh))[1:-1]))
        # Also at the tick that somebody's coming makes: the task begins its wait anew then, so some who come again and
        # again would keep all others from ever being told.
        for listener in self._listeners:
            listener.wake()

    def _note_end(self, ended: EndedRequest) -> None:
        self._ended_number += 1
        self._ended.append(_Ended(self._ended_number, ended.tenant, _encode(request_line(ended))))

    def _last_step(self) -> int:
        last = self._llm.steps.last(1)
        return last[0].step_id if last else -1

    # ----------------------------------------------------------------------- frames

    def _first(self, listener: Listener) -> bytes:
        """The present tick, with what does not change and the latest of all that does."""
        now = now_ns()
        steps = self._llm.steps.last(FIRST_STEPS)
        requests = self._llm.recent.latest(FIRST_REQUESTS, listener.tenant)
        head = {"engine": self._snapshots.engine(), "step_fields": FIELDS}
        listener.tick, listener.kv, listener.request = self._number, self._kv_number, self._ended_number
        listener.due_ns = now + listener.gap_ns
        return _joined(
            self._ticks[-1].common + b"," + _encode(head)[1:-1],
            _encode(bars(steps, most=10 * MAX_BARS))[1:-1],
            b",".join(_encode(request_line(ended)) for ended in reversed(requests)),
            self._kv,
        )

    def _frame(self, listener: Listener) -> bytes:
        steps = b",".join(tick.steps for tick in self._ticks if tick.number > listener.tick and tick.steps)
        requests = b",".join(
            ended.line
            for ended in self._ended
            if ended.number > listener.request and listener.tenant in (None, ended.tenant)
        )
        kv = self._kv if self._kv_number > listener.kv else None
        listener.tick, listener.kv, listener.request = self._number, self._kv_number, self._ended_number
        # A tick may come a moment early: a listener at the ticks' own pace would then be told every other one.
        listener.due_ns = now_ns() + listener.gap_ns * 3 // 4
        return _joined(self._ticks[-1].common, steps, requests, kv)


def _joined(common: bytes, steps: bytes, requests: bytes, kv: bytes | None) -> bytes:
    """One JSON object of parts that are encoded already: most of them are the same for all listeners."""
    more = b"" if kv is None else b',"kv":' + kv
    return b"%b%b" % (common, b',"steps":[%b],"requests":[%b]%b}' % (steps, requests, more))


def _nothing() -> None:
    """Nobody is subscribed yet."""


def _crowded() -> ApiError:
    return unavailable(f"{MAX_LISTENERS} listeners read the dashboard's feed already.", "dashboard_full")


def parse_hz(text: str | None) -> float:
    """The ``hz`` of a query. Raises `ApiError` 400."""
    if text is None:
        return DEFAULT_HZ
    try:
        hz = float(text)
    except ValueError:
        hz = float("nan")
    if not MIN_HZ <= hz <= MAX_HZ:
        raise ApiError(400, f"hz must be a number in [{MIN_HZ:g}, {MAX_HZ:g}], got {text!r:.40}", param="hz")
    return hz
