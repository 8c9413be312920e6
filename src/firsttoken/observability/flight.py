"""The flight recorder: the last minutes of an engine as its front end saw them, to be written when something happened.

Of a prompt it keeps its length, and for each piece a hash that says whether another prompt begins alike. The hashes
are keyed with a random number that never leaves the process, so nobody can try what a prompt may have been.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from firsttoken.core.clock import NS_PER_MS, NS_PER_S, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.request import EngineRequest
from firsttoken.core.timeline import Mark
from firsttoken.observability.flight_file import (
    FlightEvent,
    FlightHead,
    FlightRequest,
    FlightSettings,
    Outcome,
    write_flight,
)
from firsttoken.observability.step_history import StepHistory
from firsttoken.transport.messages import EngineInfo, EngineStats, RequestDelta, StepOutputs

log = logging.getLogger(__name__)

KEEP_S = 300.0
MAX_REQUEST_BYTES = 32 << 20
# A shard of the KV cache has 128 tokens or more: what is alike for less is not found again.
PIECE_TOKENS = 128
PIECE_BYTES = PIECE_TOKENS * 4
# Prompts wait to be hashed until they, and the requests that they are of, take so many bytes together: not while their
# first tokens are waited for.
HASH_AT_BYTES = 1 << 20
# More bytes of them are not kept to be hashed where that thread is held up, as by a disk that hangs.
MAX_HASHING_BYTES = 64 << 20
# After so many pieces, some 40 us of work, the hashing thread lets others have the interpreter.
HASH_TURN = 32
# What an ended request takes beside its gaps (4 bytes) and pieces (8 bytes).
REQUEST_BYTES = 700
STATS_NS = NS_PER_S
FREEZE_NS = 10 * NS_PER_MS
MAX_EVENTS = 1000
MAX_TEXT = 500


class _Flying:
    """One request of the engine, while it runs and afterwards."""

    __slots__ = (
        "cached",
        "deadline_ms",
        "ended_ns",
        "gaps",
        "id",
        "max_tokens",
        "outcome",
        "pieces",
        "preemptions",
        "priority",
        "prompt_tokens",
        "sent_ns",
        "service",
        "started_ns",
        "tenant",
        "times",
    )

    def __init__(self, wire: EngineRequest, now: int, tenant: int) -> None:
        self.id = wire.id
        self.sent_ns = now
        self.service, self.priority, self.tenant = wire.service, wire.priority, tenant
        self.prompt_tokens, self.max_tokens = len(wire.prompt) // 4, wire.max_tokens
        self.deadline_ms = max(wire.deadline_ns - now, 0) / NS_PER_MS if wire.deadline_ns else 0.0
        self.outcome: Outcome = "running"
        self.started_ns = self.ended_ns = self.cached = self.preemptions = 0
        self.times = array("q")  # of its tokens, while it runs; then the first alone
        self.gaps: array[int] | None = None  # in us, once it has ended
        self.pieces: array[int] | None = None  # None until they are hashed

    def note(self, delta: RequestDelta) -> None:
        """What the first and the last delta say."""
        self.cached = max(self.cached, delta.cached_tokens)
        self.preemptions = max(self.preemptions, delta.preemptions)
        if not self.started_ns:
            self.started_ns = next((ns for mark, ns in delta.stamps if mark == Mark.SCHEDULED), 0)

    def end(self, outcome: Outcome, now: int) -> None:
        self.outcome, self.ended_ns = outcome, now
        self.gaps = _gaps(self.times)
        self.times = self.times[:1]

    @property
    def nbytes(self) -> int:
        gaps = 0 if self.gaps is None else len(self.gaps)
        return REQUEST_BYTES + 4 * gaps + 8 * -(-self.prompt_tokens // PIECE_TOKENS)

    def record(self, number: Callable[[int], int]) -> FlightRequest:
        """``number`` gives the same number for the same hash."""
        gaps = _gaps(self.times) if self.gaps is None else self.gaps
        return FlightRequest(
            id=self.id,
            at_ns=self.sent_ns,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            outcome=self.outcome,
            service=self.service,
            tenant=self.tenant,
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            cached_tokens=self.cached,
            output_tokens=len(gaps) + 1 if self.times else 0,
            preemptions=self.preemptions,
            started_ns=self._since(self.started_ns),
            first_ns=self._since(self.times[0]) if self.times else 0,
            ended_ns=self._since(self.ended_ns),
            pieces=[number(piece) for piece in self.pieces or ()],
            gaps_us=gaps.tolist(),
        )

    def _since(self, ns: int) -> int:
        return max(ns - self.sent_ns, 1) if ns else 0


class FlightRecorder:
    """Told by the front end of all that goes to the engine and comes back; ``steps`` are kept for it elsewhere.

    It writes to ``folder``, None for nowhere. At most `KEEP_S` seconds and `MAX_REQUEST_BYTES` of ended requests are
    kept. What takes time is done by a thread of its own.
    """

    def __init__(self, steps: StepHistory, folder: Path | None = None) -> None:
        self.steps = steps
        self.folder = folder
        self.info: EngineInfo | None = None
        self.settings = FlightSettings()
        self._key = os.urandom(32)
        self._live: dict[int, _Flying] = {}
        self._ended: deque[_Flying] = deque()
        self._nbytes = 0
        self._tenants: dict[str, int] = {"": 0}
        self._unhashed: list[tuple[_Flying, bytes, str]] = []
        self._unhashed_bytes = 0
        self._hashing_bytes = 0  # of those that the worker has, or is to get to
        self._dumps = 0
        self._latest: dict[str, int] = {}  # of dumps that are not written, by reason
        self._closed = False
        self._stats: deque[EngineStats] = deque(maxlen=int(KEEP_S))
        self._events: deque[FlightEvent] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()  # callers of `LLM` send from threads of their own
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="firsttoken-flight")
        self._collecting_since = 0

    def write_for(self, args: EngineArgs) -> None:
        """The engine is, or will be, one of these."""
        self.folder = None if args.flight_dir is None else Path(args.flight_dir)
        self.settings = FlightSettings.of(args)

    # ------------------------------------------------------------------ what happens

    def submitted(self, requests: Sequence[EngineRequest]) -> None:
        """These were sent to the engine just now. One that was turned away may be sent again."""
        now = now_ns()
        with self._lock:
            for wire in requests:
                tenant = self._tenants.setdefault(wire.tenant, len(self._tenants))
                flying = self._live[wire.id] = _Flying(wire, now, tenant)
                self._unhashed.append((flying, wire.prompt, wire.salt))
                self._unhashed_bytes += len(wire.prompt) + REQUEST_BYTES
            if self._unhashed_bytes > HASH_AT_BYTES:
                self._hash_waiting()

    def told(self, step: StepOutputs, ns: int) -> None:
        """The engine said this; it came at ``ns``."""
        live = self._live
        with self._lock:
            for delta in step.deltas:
                flying = live.get(delta.id)
                if flying is None:
                    continue
                for _ in delta.tokens:
                    flying.times.append(ns)
                reason = delta.finish_reason
                if reason is not None or delta.stamps:
                    flying.note(delta)
                if reason is not None:
                    self._end(delta.id, _OUTCOMES.get(reason, "finished"), ns, delta.code)
        stats = step.stats
        if not self._stats or stats.heartbeat_ns - self._stats[-1].heartbeat_ns >= STATS_NS:
            self._stats.append(stats)

    def refused(self, request_id: int, code: str | None = None) -> None:
        """The engine does not run it; ``code`` is why."""
        with self._lock:
            self._end(request_id, "refused", now_ns(), code)

    def left(self, ids: Collection[int], *, finished: bool) -> None:
        """The front end has ended these: a stop string was found (``finished``), or the caller has gone."""
        now = now_ns()
        with self._lock:
            for request_id in ids:
                self._end(request_id, "finished" if finished else "aborted", now)

    def died(self, why: str) -> None:
        """The engine is gone without having been asked to. What is known is written."""
        now = now_ns()
        with self._lock:
            for request_id in list(self._live):
                self._end(request_id, "failed", now)
        self.event("engine died", why)
        if self.folder is not None:
            self.dump(f"engine died: {why}")

    def event(self, kind: str, text: str = "") -> None:
        self._events.append(FlightEvent(now_ns(), kind, text[:MAX_TEXT]))

    def watch_collector(self) -> Callable[[], None]:
        """From now on, note the pauses that this process's garbage collector makes; what is returned ends that."""
        if self._on_gc not in gc.callbacks:
            gc.callbacks.append(self._on_gc)
        return lambda: gc.callbacks.remove(self._on_gc) if self._on_gc in gc.callbacks else None

    # ------------------------------------------------------------------ what is kept of it

    def dump(self, reason: str) -> Future[Path | None]:
        """Write a file, on another thread; what became of it is logged. The result is its path, None without one. Of
        several for one ``reason`` that wait while another is written only the last is written: it has all of them."""
        if self.folder is None or self._closed:
            log.warning("flight recorder: %s, but %s", reason, _NO_FOLDER if self.folder is None else "the server ends")
            nothing: Future[Path | None] = Future()
            nothing.set_result(None)
            return nothing
        head = FlightHead.now(reason[:MAX_TEXT], PIECE_TOKENS, self.info, self.settings)
        with self._lock:
            self._forget_old(now_ns())
            self._hash_waiting()
            requests = [*self._ended, *self._live.values()]
            self._dumps += 1
            number = self._latest[head.reason] = self._dumps
        content = (self.steps.copied(), requests, list(self._stats), list(self._events))
        return self._worker.submit(self._write, self.folder, head, number, *content)

    def close(self) -> None:
        """Wait for what is being written; nothing is written any more."""
        with self._lock:
            self._closed = True
        self._worker.shutdown()

    @property
    def num_requests(self) -> int:
        return len(self._ended) + len(self._live)

    @property
    def request_bytes(self) -> int:
        """About what ended requests take."""
        return self._nbytes

    # ------------------------------------------------------------------ inside

    def _end(self, request_id: int, outcome: Outcome, now: int, code: str | None = None) -> None:
        flying = self._live.pop(request_id, None)
        if flying is None:
            return
        flying.end("expired" if code == "deadline_exceeded" else outcome, now)
        self._ended.append(flying)
        self._nbytes += flying.nbytes
        self._forget_old(now)

    def _forget_old(self, now: int) -> None:
        since = now - int(KEEP_S * NS_PER_S)
        ended = self._ended
        while ended and (ended[0].ended_ns < since or self._nbytes > MAX_REQUEST_BYTES):
            self._nbytes -= ended.popleft().nbytes

    def _hash_waiting(self) -> None:
        """Under the lock. Prompts for which there is no room count as like no others."""
        waiting, self._unhashed = self._unhashed, []
        nbytes, self._unhashed_bytes = self._unhashed_bytes, 0
        if waiting and not self._closed and self._hashing_bytes + nbytes <= MAX_HASHING_BYTES:
            self._hashing_bytes += nbytes
            self._worker.submit(self._hash, waiting, nbytes)

    def _hash(self, waiting: list[tuple[_Flying, bytes, str]], nbytes: int) -> None:
        """On the worker's thread."""
        done = 0
        for flying, prompt, salt in waiting:
            parent = self._digest(salt.encode("utf-8", "surrogatepass"))
            pieces = array("Q")
            for at in range(0, len(prompt), PIECE_BYTES):
                parent = self._digest(parent + prompt[at : at + PIECE_BYTES])
                pieces.append(int.from_bytes(parent, "little"))
                done += 1
                if not done % HASH_TURN:
                    time.sleep(0)
            flying.pieces = pieces
        with self._lock:
            self._hashing_bytes -= nbytes

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8, key=self._key).digest()

    def _write(
        self,
        folder: Path,
        head: FlightHead,
        number: int,
        steps: StepHistory,
        requests: list[_Flying],
        stats: list[EngineStats],
        events: list[FlightEvent],
    ) -> Path | None:
        """On the worker's thread, behind the hashing of all these prompts."""
        with self._lock:
            if self._latest[head.reason] != number:
                return None
            del self._latest[head.reason]
        numbers: dict[int, int] = {}

        def numbered(piece: int) -> int:
            return numbers.setdefault(piece, len(numbers))

        def records() -> Iterator[FlightRequest]:
            return (flying.record(numbered) for flying in requests)

        try:
            path = write_flight(folder, head, steps=steps.pieces(), requests=records(), stats=stats, events=events)
        except OSError as error:
            log.error("flight recorder: nothing could be written to %s: %s", folder, error)
            return None
        except Exception:
            log.exception("flight recorder: nothing could be written to %s", folder)
            return None
        log.warning(
            "flight recorder: %s; %d requests and %d steps are in %s (firsttoken replay runs them again)",
            head.reason,
            len(requests),
            len(steps),
            path,
        )
        return path

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = now_ns()
        elif self._collecting_since:
            took = now_ns() - self._collecting_since
            self._collecting_since = 0
            if took >= FREEZE_NS:
                self.event("gc", f"generation {info.get('generation')} took {took / NS_PER_MS:.1f} ms here")


_NO_FOLDER = "there is no folder to write to: give --flight-dir"
_OUTCOMES: dict[str, Outcome] = {"abort": "aborted", "error": "failed"}


def _gaps(times: array[int]) -> array[int]:
    """In us, 32 bits each."""
    return array("I", [min((after - before) // 1000, 0xFFFFFFFF) for before, after in pairwise(times)])
