"""The front end's side of one engine: who waits for which request, what the engine last said, whether it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import CheckpointError, ConfigError, EngineDead, FirstTokenError
from firsttoken.core.request import EngineRequest
from firsttoken.core.step_record import StepRecord
from firsttoken.core.timeline import Mark
from firsttoken.frontend.times import Books
from firsttoken.observability.flight import FlightRecorder
from firsttoken.transport.channel import ChannelClosed, EngineHandle
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    Ready,
    Refused,
    RequestDelta,
    StepOutputs,
    Submit,
)

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Who waits for requests. Called where the channel delivers (the event loop, or the reader's thread)."""

    def deliver(self, delta: RequestDelta, ns: int) -> None:
        """What came at ``ns``. It may be told on here: on an event loop, turns are for that."""

    def keep(self, delta: RequestDelta, ns: int) -> None:
        """The same, only to be noted: more comes for the same request soon, or `wake`."""

    def wake(self) -> None:
        """What was kept is to be seen to, in the owner's own time."""

    def refuse(self, refusal: Refused) -> None: ...

    def die(self, error: EngineDead) -> None: ...


class Leaver(Protocol):
    """Who has aborted requests and wants the engine's last word of them, which says where their time went."""

    def part(self, request_id: int, last: RequestDelta | None) -> None:
        """``last`` is None where there is none: the engine is gone."""


LONGEST_HOLD_NS = 10**6
# How often, and how many times at most, a process whose channel has closed is asked how it ended.
EXIT_LOOK_S, EXIT_LOOKS = 0.005, 20
# Of so many requests that were aborted the engine's last word is waited for: one that is stuck says none.
MAX_PARTING = 4096


class EngineLink:
    """Routes the engine's messages to the sinks of its live requests.

    Invariant: an id is in the table from before its Submit is sent until its last delta, its refusal, its abort or
    the engine's death; each of these happens at most once, so no sink is told about an end twice.
    """

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.ready: Future[EngineInfo] = Future()
        # Who waits may give up, the start goes on: a cancelled wait must not count as an engine that is ready.
        self.ready.set_running_or_notify_cancel()
        self.stats = EngineStats()
        self.kv: KVReport | None = None  # the latest
        self.error: EngineDead | None = None
        self.on_idle: Callable[[], None] = _nothing  # no request is left
        self.on_stats: Callable[[EngineStats], None] = _ignore
        self.on_kv: Callable[[KVReport], None] = _ignore
        self.on_steps: Callable[[list[StepRecord]], None] = _ignore
        self.on_dead: Callable[[], None] = _nothing
        self.back_in_s: Callable[[], int | None] = _never  # asked at its death: until another takes its place
        self.flight: FlightRecorder | None = None
        self.books = Books()
        self._sinks: dict[int, Sink] = {}
        self._parting: dict[int, Leaver] = {}  # aborted, and the engine's last word has not come
        self._fresh: set[int] = set()  # live requests that have got nothing yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._later: deque[RequestDelta] = deque()  # on a loop: arrived at _later_ns, and not delivered yet
        self._later_ns = 0
        self._turn_due = False
        self._outbox: list[EngineRequest] = []  # on a loop: of this turn, not sent yet
        self._held_since_ns = 0
        self._suspect = False

    @property
    def live(self) -> int:
        """Requests that the engine still works on."""
        return len(self._sinks)

    def sink(self, request_id: int) -> Sink | None:
        """Who waits for a request of this engine id."""
        return self._sinks.get(request_id)

    def listen(self) -> None:
        """Start to receive; within a running event loop everything then happens on that loop."""
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self.handle.client.listen(self._on_message, self._on_close)

    def submit(self, requests: list[EngineRequest], sink: Sink) -> None:
        """Send requests in one message, to start together. Raises `EngineDead` when the engine is known to be gone.

        On an event loop they leave at the end of this turn, in one message with all others of the turn: an idle engine
        would begin with the first alone, and the others wait for its step and then compute beside its decode row. A
        turn that brings so many that it takes long sends what it has every millisecond.
        """
        for request in requests:
            self._sinks[request.id] = sink
            self._fresh.add(request.id)
        if self.flight is not None:
            self.flight.submitted(requests)
        # Looked at after the table was filled: a death noticed by another thread either sees these or is seen here.
        if self._loop is None and self.error is None:
            self._tell(requests)
        if self.error is not None:
            for request in requests:
                self._drop(request.id)
            if self.flight is not None:
                self.flight.left([request.id for request in requests], finished=False)
            raise EngineDead(str(self.error))
        if self._loop is not None:
            now = now_ns()
            if not self._outbox:
                self._loop.call_soon(self._flush)
                self._held_since_ns = now
            self._outbox += requests
            if now - self._held_since_ns > LONGEST_HOLD_NS:
                self._flush()

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests and self.error is None:
            self._tell(requests)

    def _tell(self, requests: list[EngineRequest]) -> None:
        try:
            self.handle.client.send(Submit(requests))
        except (ChannelClosed, OSError):
            self._gone("the channel to it is closed")

    def expect(self, requests: list[EngineRequest], sink: Sink) -> None:
        """The second half: what the engine says of these requests is for ``sink``."""
        for request in requests:
            self._sinks[request.id] = sink
            self._fresh.add(request.id)

    def abort(self, ids: Collection[int], leaver: Leaver | None = None, *, finished: bool = False) -> None:
        """Forget these requests and end them in the engine; ids that have ended already are left alone. ``leaver`` is
        told the engine's last word of each of the others, once, if only that it has none. ``finished``: they have all
        that they need."""
        live = [request_id for request_id in ids if self._drop(request_id) is not None]
        if live and self.flight is not None:
            self.flight.left(live, finished=finished)
        if live and self.error is None:
            self._flush()  # it must know them
            if leaver is not None:
                self._parting |= dict.fromkeys(live, leaver)
                while len(self._parting) > MAX_PARTING:
                    self._part(next(iter(self._parting)), None)
            try:
                self.handle.client.send(Abort(live))
            except (ChannelClosed, OSError):
                self._gone("the channel to it is closed")
        elif leaver is not None:
            for request_id in live:
                leaver.part(request_id, None)
        if live and not self._sinks:
            self.on_idle()

    def check(self) -> None:
        """Notice a death that the channel did not report, at the second look: its last words may be on their way."""
        if self.error is not None or self.handle.alive():
            return
        if self._suspect:
            self._gone("it ended without a word")
        self._suspect = True

    def fail(self, why: str, unready: FirstTokenError | None = None, *, asked: bool = False) -> None:
        """The engine is gone: tell everyone who waits, once; those who wait for its start get ``unready`` if given.

        A started engine's end is logged, unless it was ``asked`` for: without requests nobody else would hear of it.
        """
        if self.error is not None:
            return
        for sink in self._keep_later().values():
            sink.wake()
        self.error = EngineDead(f"the engine stopped: {why}", None if asked else self.back_in_s())
        unasked = self.ready.done() and not asked  # it had started
        if unasked:
            logger.error("%s; requests that ended with it: %d", self.error, len(self._sinks))
        with contextlib.suppress(InvalidStateError):  # it may have been ready
            self.ready.set_exception(unready or self.error)
        if self.flight is not None and unasked:
            self.flight.died(why)
        sinks = {id(sink): sink for sink in list(self._sinks.values())}
        self._sinks.clear()
        self._fresh.clear()
        for request_id in list(self._parting):
            self._part(request_id, None)
        for sink in sinks.values():
            sink.die(self.error)
        self.on_dead()
        self.on_idle()

    def _on_message(self, message: FromEngine) -> None:
        kept = self._keep_later()  # what came before goes before
        if isinstance(message, StepOutputs):
            self._on_step(message, kept)
            return
        for waiting in kept.values():
            waiting.wake()
        if isinstance(message, Refused):
            if self.flight is not None:
                self.flight.refused(message.id, message.code)
            sink = self._drop(message.id)
            if sink is not None:
                sink.refuse(message)
                self._after_end()
            else:
                # It was at the engine by now: that much is known.
                arrived = [(int(Mark.ARRIVED), now_ns())]
                self._part(message.id, RequestDelta(message.id, [], finish_reason="error", stamps=arrived))
        elif isinstance(message, Ready):
            with contextlib.suppress(InvalidStateError):  # it may have been given up meanwhile
                self.ready.set_result(message.info)
        elif isinstance(message, Failed):
            self.fail(message.message, _refusal(message))

    def _on_step(self, step: StepOutputs, kept: dict[int, Sink]) -> None:
        self.stats = step.stats
        if step.kv is not None:
            self.kv = step.kv
        try:
            self.on_stats(step.stats)
            if step.kv is not None:
                self.on_kv(step.kv)
            if step.steps:  # before the deltas: what ended is accounted for by them
                self.on_steps(step.steps)
        except Exception:  # a number that is lost is no reason for tokens to be
            logger.exception("what the engine says of itself could not be kept")
        ns = now_ns()
        deltas = step.deltas
        behind = bool(kept)
        if behind:  # who has waited since the step before goes first, or the last in the order would never be served
            deltas = sorted(deltas, key=lambda delta: delta.id not in kept)
            for delta in deltas:
                kept.pop(delta.id, None)
            for sink in kept.values():
                sink.wake()
        firsts = [delta for delta in deltas if delta.id in self._fresh] if self._fresh else []
        if firsts:
            # A first token is awaited most: it goes before the next tokens of streams that flow already.
            deltas = firsts + [delta for delta in deltas if delta.id not in self._fresh]
            self._fresh.difference_update([delta.id for delta in firsts])
        if self._loop is None:
            for delta in deltas:
                self._deliver(delta, ns)
        else:
            self._later.extend(deltas)
            self._later_ns = ns
            if not self._turn_due:
                self._turn()
        # Once the first caller has his token. Of what he was told the books are kept when all have theirs, but where
        # steps come so fast that this is never so.
        if self.flight is not None:
            self.flight.told(step, ns)
        if behind:
            self.books.settle()

    def _turn(self) -> None:
        """Deliver one, and the next in a later turn of the loop. A turn costs little more than a microsecond, and
        a token some thirty (most of it the kernel's): so a first token is written before others are even looked at,
        and a new request waits for one token of somebody else's, not for those of a whole step."""
        later = self._later
        if later:
            self._deliver(later.popleft(), self._later_ns)
        if later and self._loop is not None:
            self._turn_due = True
            self._loop.call_soon(self._turn)
        else:
            self._turn_due = False
            self.books.settle()

    def _keep_later(self) -> dict[int, Sink]:
        """The engine says more before all of the last step was delivered: those whose turn has not come, by their
        requests, keep what they have not got, and get it with what comes now."""
        kept: dict[int, Sink] = {}
        while self._later:
            delta = self._later.popleft()
            sink = self._sinks.get(delta.id)
            if sink is not None:
                if delta.finish_reason is not None:
                    del self._sinks[delta.id]
                sink.keep(delta, self._later_ns)
                kept[delta.id] = sink
            if delta.finish_reason is not None:
                self._ended(delta, sink)
        return kept

    def _deliver(self, delta: RequestDelta, ns: int) -> None:
        if delta.finish_reason is None:  # nearly always
            sink = self._sinks.get(delta.id)
            if sink is not None:
                sink.deliver(delta, ns)
            return
        sink = self._sinks.pop(delta.id, None)
        if sink is not None:
            sink.deliver(delta, ns)
        self._ended(delta, sink)

    def _ended(self, last: RequestDelta, sink: Sink | None) -> None:
        """``sink`` is None when it was aborted here while this was on its way."""
        if sink is None:
            self._part(last.id, last)
        self._after_end()

    def _part(self, request_id: int, last: RequestDelta | None) -> None:
        leaver = self._parting.pop(request_id, None)
        if leaver is not None:
            leaver.part(request_id, last)

    def _drop(self, request_id: int) -> Sink | None:
        self._fresh.discard(request_id)
        return self._sinks.pop(request_id, None)

    def _after_end(self) -> None:
        if not self._sinks:
            self.on_idle()

    def _on_close(self, looks: int = EXIT_LOOKS) -> None:
        if looks and self._loop is not None and self.handle.pid is not None and not self.handle.how_it_ended():
            # A process that is killed closes its files a moment before it can be asked how it ended.
            self._loop.call_later(EXIT_LOOK_S, self._on_close, looks - 1)
        else:
            self._gone("its end of the channel was closed")

    def _gone(self, otherwise: str) -> None:
        """It is, without a word of its own: say how its process ended, where that is known."""
        self.fail(self.handle.how_it_ended() or otherwise)


def _refusal(failed: Failed) -> FirstTokenError | None:
    """What the engine refused to start for, as the error that it raised; None when it broke."""
    match failed.kind:
        case "config":
            return ConfigError(failed.message)
        case "checkpoint":
            return CheckpointError(failed.message)
    return None


def _nothing() -> None:
    """The default for callbacks that nobody set."""


def _never() -> None:
    """The same, where it asks."""


def _ignore(_: object) -> None:
    """The same, of numbers."""
