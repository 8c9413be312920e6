"""One HTTP call on a hot route, as plain ASGI: its body, its answer, and the watch for a caller who leaves.

Starlette's request and response classes are not used here: its streaming response opens a task group per request,
which costs milliseconds of time to first token when many callers start together.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.outcome import NOT_SERVED, Outcome
from firsttoken.core.service import KeyRule
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.ended import last_of
from firsttoken.observability.account import server_timing_header, stages
from firsttoken.server.access import log_call
from firsttoken.server.content import Content
from firsttoken.server.dialects import dialect_of
from firsttoken.server.errors import ApiError, Headers, as_api_error, bad_request, stopping

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Generation
    from firsttoken.server.quota import Grant, Quota

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[["Call"], Awaitable[None]]
Put = Callable[[bytes], Coroutine[Any, Any, None] | None]
"""Writes at once. What it returns, if anything, is to be awaited before more is written."""

JSON = (b"content-type", b"application/json")
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# The key in an ASGI scope of the `Caller`, where there are API keys.
CALLER = "firsttoken.caller"
# The key in an ASGI scope of the time at which the request's first byte was read, where the server knows it.
RECEIVED_NS = "firsttoken.received_ns"
# The key in an ASGI scope that is there once the whole body has been read, where the server knows it.
BODY_READ = "firsttoken.body_read"
# The key in an ASGI scope of a function that takes what to call when the caller leaves, where the server has one.
WATCH = "firsttoken.watch"
# The key in an ASGI scope of a `Put` for pieces of the answer's body, where the server has one.
WRITE = "firsttoken.write"
MAX_ID_CHARS = 128
# How long the next piece of a body may take, and how many bytes a second must come where the whole takes longer.
BODY_STALL_S = 75.0
BODY_BYTES_PER_S = 1024
# About how many bytes of an answer that comes in pieces are made at once: on the event loop, and in a thread.
_INLINE_PIECES, _PIECES = 16 << 10, 64 << 10
# Seeded once by the operating system; of its own, so that a caller of random.seed() cannot make ids repeat.
_IDS = random.Random()
_NOT_ID = re.compile(rb"[^A-Za-z0-9._:/+=@-]")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who holds the key of a request. ``tenant`` is who shares a class by ``rule``, ``salt`` what his cached prefixes
    begin with, ``name`` the key's name ("" for a key without a rule of its own), ``quota`` what is left of his."""

    tenant: str
    rule: KeyRule
    salt: str = ""
    name: str = ""
    quota: Quota | None = None


ANYBODY = Caller("", KeyRule())


class ClientGone(Exception):
    """The caller closed the connection before the body was complete."""


class Call:
    """Owns one exchange. ``timeline`` starts when the first byte of the request has been read."""

    __slots__ = (
        "_receive",
        "_send",
        "_task",
        "_watcher",
        "_write",
        "complete",
        "content",
        "dialect",
        "ended",
        "failure",
        "generations",
        "grant",
        "request_id",
        "response_id",
        "scope",
        "started",
        "status",
        "timeline",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.timeline = Timeline()
        self.timeline.stamp(Mark.RECEIVED, scope.get(RECEIVED_NS))
        self.scope = scope
        self.request_id = request_id(scope)
        self.dialect = dialect_of(scope["path"])  # a stream may set its own, once it has begun
        self.response_id = ""  # the ``id`` in its answer
        self.started = False
        self.status = 0  # of the answer, as it was sent: a stream that fails had its 200 before
        self.failure: ApiError | None = None  # what it was answered with, or its stream ended with
        self.generations: list[Generation] = []  # what the engine was asked for
        self.grant: Grant | None = None  # of the quota of its key
        self.content: Content | None = None  # for the audit log
        self.complete = False
        self.ended: str | None = None  # why the call was cancelled: "gone" or "stopping"
        self._receive = receive
        self._send = send
        self._write: Put | None = scope.get(WRITE)
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def caller(self) -> Caller:
        """Whose key came with the request."""
        return caller_of(self.scope)

    @property
    def outcome(self) -> Outcome:
        """How it ended, once it has: the one word for it in metrics, records, traces and the log."""
        if self.ended is not None or not self.status:  # without a status the whole process is being cancelled
            return "aborted"
        return "finished" if self.failure is None else self.failure.outcome

    @property
    def error(self) -> str:
        """The word for what it was answered with; "" without an error."""
        return "" if self.failure is None else self.failure.word

    @property
    def last(self) -> Generation | None:
        """Of the prompts of the request the one whose answers ended last."""
        return last_of(self.generations)

    @property
    def last_timeline(self) -> Timeline:
        """Its timeline, which begins with the call's."""
        last = self.last
        return self.timeline if last is None else last.timeline

    # --------------------------------------------------------------------- quota

    def enter(self) -> None:
        """Within the requests that its key may send. Raises `ApiError` 429."""
        quota = self.caller.quota
        if quota is not None:
            self.grant = quota.enter()

    def take_id(self, given: str | None) -> None:
        """An id that came in the body, as vLLM takes it; the header is the other way. Raises `ApiError` 400 for one
        that could not be a header's, or is not the header's."""
        if given is None:
            return
        raw = given.encode("utf-8", "replace")
        if not given or len(raw) > MAX_ID_CHARS or _NOT_ID.search(raw):
            raise bad_request(
                f"request_id must have 1 to {MAX_ID_CHARS} letters, digits or any of ._:/+=@-, got {given!r:.80}",
                "request_id",
            )
        if given_id(self.scope) not in (None, given):
            raise bad_request("request_id and the header X-Request-Id differ: send one", "request_id")
        self.request_id = given

    def reserve(self, prompt: int, output: int, *, asked: bool = True) -> None:
        """Within the tokens that its key may use: those of its prompts, and of the longest answers to them; ``asked``:
        these are as long as the caller said. Raises `ApiError` 429 or 400."""
        if self.grant is not None:
            self.grant.reserve(prompt, output, asked=asked)

    def _settle(self) -> None:
        if self.grant is not None:
            self.grant.close(sum(_used(one) for one in self.generations))

    # ------------------------------------------------------------------- reading

    async def body(self, limit: int) -> bytes:
        """The whole body; from then on a caller who leaves ends the call. Raises `ApiError` 408, 413 or 415, and
        `ClientGone`."""
        encoding = header(self.scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            raise _encoded(encoding)
        declared = header(self.scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        began_ns = now_ns()
        while True:
            message = await self._next_piece(size, began_ns)
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                break
        watch = self.scope.get(WATCH)
        if watch is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        else:
            watch(self._leave)
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if self.content is not None:
            self.content.asked(whole)
        return whole

    async def _next_piece(self, size: int, began_ns: int) -> MutableMapping[str, Any]:
        """The next message of the body, of which ``size`` bytes are here since ``began_ns``."""
        if BODY_READ in self.scope:  # as for most requests: it arrived with the head, so there is nothing to time
            return await self._receive()
        took_s = (now_ns() - began_ns) / NS_PER_S
        left_s = BODY_STALL_S + size / BODY_BYTES_PER_S - took_s
        try:
            async with asyncio.timeout(min(BODY_STALL_S, left_s)):
                return await self._receive()
        except TimeoutError:
            raise _too_slow(size, dripping=left_s < BODY_STALL_S) from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.end("gone")

    def end(self, why: str) -> bool:
        """Cancel the call's task, wherever it waits. Does nothing (False) once the answer is complete."""
        if self.complete or self.ended is not None or self._task is None:
            return False
        self.ended = why
        self._task.cancel()
        return True

    def close(self) -> None:
        self._settle()
        if self._watcher is not None:
            self._watcher.cancel()

    # ------------------------------------------------------------------- writing

    async def reply(self, status: int, body: bytes | Iterator[bytes], headers: Headers | None = None) -> None:
        """The whole answer, as JSON. A long one that comes in pieces is made as it is written, so that no more of it is
        held than the caller has not read yet; how long it is cannot be told beforehand."""
        own = [JSON, *self.dialect.headers(self.request_id), *(headers or [])]
        if isinstance(body, bytes):
            begun, whole = body, True
        else:
            begun, whole = _joined(body, _INLINE_PIECES)
        if whole:
            own.append((b"content-length", str(len(begun)).encode()))
        await self._start(status, own)
        await self.write(begun, last=whole)
        if not isinstance(body, bytes) and not whole:
            await self.write_pieces(body, last=True)

    async def start_stream(self) -> None:
        """Status 200 and the headers of an event stream."""
        await self._start(200, [*EVENT_STREAM, *self.dialect.headers(self.request_id)])

    async def write(self, data: bytes, *, last: bool = False) -> None:
        # Set before the last byte goes out: a disconnect seen after it is the normal end of the exchange.
        self.complete = self.complete or last
        if self.content is not None:
            self.content.told(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def write_pieces(self, pieces: Iterator[bytes], *, last: bool = False) -> None:
        """Write what is made on the way, in threads."""
        whole = False
        while not whole:
            data, whole = await asyncio.to_thread(_joined, pieces, _PIECES)
            await self.write(data, last=last and whole)

    @property
    def put(self) -> Put:
        """As `write`, of a piece that is not the last, from where nothing can be awaited."""
        put = self._write or self._send_piece
        content = self.content
        if content is None:
            return put

        def put_noted(data: bytes) -> Coroutine[Any, Any, None] | None:
            content.told(data)
            return put(data)

        return put_noted

    async def _send_piece(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def fail(self, error: ApiError) -> None:
        """Plain JSON when nothing was sent yet; else one error event, and the stream ends."""
        if self.complete:
            return
        self.last_timeline.stamp(Mark.FAILED)
        self.failure = error
        if self.started:
            await self.write(self.dialect.error_event(error, self.request_id), last=True)
        else:
            last = self.last
            told = stages(self.timeline) if last is None else last.stages()
            timing = (b"server-timing", server_timing_header(told).encode())
            body = self.dialect.error_body(error, self.request_id)
            await self.reply(error.status, body, [*error.headers, timing])

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        if self.grant is not None and status != 429:  # a refusal has them already
            headers = [*headers, *self.grant.headers()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class Live:
    """The calls in progress on hot routes. ``keep`` is given each call that is over, with its ``content`` where that is
    asked for."""

    def __init__(self, keep: Callable[[Call], None], *, content: bool = False) -> None:
        self._content = content
        self._calls: set[Call] = set()
        self._keep = keep

    def __len__(self) -> int:
        return len(self._calls)

    def end_all(self) -> int:
        """End every call with an error that says the server stops; returns how many there were."""
        return sum(call.end("stopping") for call in list(self._calls))

    async def run(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """One call from start to end, whatever happens in it."""
        call = Call(scope, receive, send)
        self._calls.add(call)
        if self._content:
            call.content = Content()
        try:
            await _guarded(handler, call)
        except asyncio.CancelledError:
            if call.ended is None:
                raise
            await _ended(call)
        finally:
            self._calls.discard(call)
            call.close()
            call.last_timeline.stamp(Mark.WRITTEN)
            self._keep(call)
            log_call(call)


async def _guarded(handler: Handler, call: Call) -> None:
    try:
        call.enter()
        await handler(call)
    except ClientGone:
        call.ended = "gone"
        call.timeline.stamp(Mark.FAILED)
    except Exception as error:
        await call.fail(as_api_error(error, call.request_id))


async def _ended(call: Call) -> None:
    """The call was cancelled by `Call.end`: this task goes on, to tell the caller why if he is still there."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    if call.ended == "stopping":
        await call.fail(stopping())
    else:
        call.last_timeline.stamp(Mark.FAILED)


def _joined(pieces: Iterator[bytes], size: int) -> tuple[bytes, bool]:
    """The next pieces, ``size`` bytes and one piece more at the most; and whether there are no others."""
    taken, length = [], 0
    for piece in pieces:
        taken.append(piece)
        if length > size:
            return b"".join(taken), False
        length += len(piece)
    return b"".join(taken), True


def _used(generation: Generation) -> int:
    """Tokens that count: a request that was never computed, by no doing of the caller's, took none."""
    if generation.outcome in NOT_SERVED and not generation.completion_tokens:
        return 0
    return generation.prompt_tokens + generation.completion_tokens


def caller_of(scope: Scope) -> Caller:
    """Whose key came with a request."""
    found = scope.get(CALLER, ANYBODY)
    assert isinstance(found, Caller)
    return found


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def request_id(scope: Scope) -> str:
    """The caller's ``X-Request-Id``, cut and cleaned so that it can be echoed anywhere; else a new one."""
    return given_id(scope) or unique_id("req")


def given_id(scope: Scope) -> str | None:
    """The caller's ``X-Request-Id``, cut and cleaned; None without one."""
    given = header(scope, b"x-request-id")
    if given:
        cleaned = _NOT_ID.sub(b"", given[: 4 * MAX_ID_CHARS])[:MAX_ID_CHARS]
        if cleaned:
            return cleaned.decode("ascii")
    return None


def unique_id(prefix: str) -> str:
    """A name that no other exchange has. Not a secret, so the operating system need not be asked for it each time."""
    return f"{prefix}-{_IDS.getrandbits(96):024x}"


def _too_large(limit: int) -> ApiError:
    return _unread(413, f"the body is larger than {limit} bytes", "body_too_large")


def _too_slow(size: int, *, dripping: bool) -> ApiError:
    message = f"nothing came for {BODY_STALL_S:g} s after {size} bytes of the body"
    if dripping:
        message = f"the body comes too slowly: {size} bytes so far, where {BODY_BYTES_PER_S} a second are the least"
    return _unread(408, message, "body_timeout")


def _encoded(encoding: bytes) -> ApiError:
    text = f"Content-Encoding {encoding.decode('latin-1')!r} is not supported: send the body as it is"
    return _unread(415, text, "unsupported_encoding")


def _unread(status: int, message: str, code: str) -> ApiError:
    """A refusal before the body's end: its rest is not read, so the connection cannot be used again."""
    return ApiError(status, message, code=code, headers=[(b"connection", b"close")])
