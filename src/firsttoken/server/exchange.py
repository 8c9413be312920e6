"""One request of an HTTP/1 connection and its answer: what ASGI's ``receive`` and ``send`` do here.

Uvicorn's own, made for whatever application there may be, takes several times the objects and code; and in a process
that has slept since the last step, each line of them is fetched anew from memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_LAST_CHUNK = b"0\r\n\r\n"
_BROKEN = [
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"21"),
    (b"connection", b"close"),
]


class Exchange:
    """Bears the names by which uvicorn's protocol knows its cycles. The head of an answer is kept and goes out with
    the first bytes of the body, since a write to a socket takes longer than all else that a token needs."""

    __slots__ = (
        "_chunked",
        "_default_headers",
        "_expects_continue",
        "_flow",
        "_given",
        "_head",
        "_in_chunks",
        "_left",
        "_on_leave",
        "_on_response",
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "transport",
    )

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        default_headers: list[tuple[bytes, bytes]],
        expects_continue: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body = b""  # what has been read and not been asked for yet
        self.more_body = True
        self.message_event = asyncio.Event()  # something has changed for `receive`
        self.response_started = False
        self.response_complete = False
        self._flow = flow
        self._default_headers = default_headers
        self._expects_continue = expects_continue
        self._given = False  # `receive` has given the end of the body
        self._head = b""  # of the answer, while it waits for the first bytes of the body
        self._chunked = False
        self._in_chunks = False  # the head and a piece of a body in chunks have gone out, and more is to come
        self._left = 0  # bytes that the declared length still allows
        self._on_leave: Callable[[], object] | None = None
        self._on_response = on_response

    async def run_asgi(self, app: App) -> None:
        """The application's call from start to end, whatever happens in it."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            log.error("the application failed", exc_info=error)
            await self._break_off()
        else:
            if not self.response_complete and not self.disconnected:
                log.error("the application returned without a complete answer")
                await self._break_off()
        finally:
            self._on_leave = None
            self.scope = {}  # it may hold `watch`, and with it this object

    def watch(self, on_leave: Callable[[], object]) -> None:
        """Call ``on_leave`` when the caller closes the connection before the answer is complete."""
        if self.disconnected:
            on_leave()
        else:
            self._on_leave = on_leave

    def lost(self) -> None:
        """The connection is gone."""
        if self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        if self._on_leave is not None:
            on_leave, self._on_leave = self._on_leave, None
            on_leave()

    # ------------------------------------------------------------------------- ASGI

    async def receive(self) -> Message:
        """The next piece of the body, or the news that the caller has left or been answered."""
        if self._expects_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        while not (self.disconnected or self.response_complete):
            if not self._given and (self.body or not self.more_body):
                body, self.body = self.body, b""
                self._given = not self.more_body
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self._flow.resume_reading()
            self.message_event.clear()
            await self.message_event.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Write the head, or a piece of the body. Raises RuntimeError when they come out of order, and for a body
        that has another length than was declared."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if self.response_complete or message["type"] != (
            "http.response.body" if self.response_started else "http.response.start"
        ):
            raise RuntimeError(f"the application sent {message['type']!r} out of its order")
        if self.response_started:
            self._write(message.get("body", b""), last=not message.get("more_body", False))
        else:
            self._start(message["status"], message.get("headers", ()))

    def write(self, body: bytes) -> Coroutine[Any, Any, None] | None:
        """A piece of the body that is not the last, at once. What is returned, if anything, is to be awaited before
        more is sent: the caller has yet to read what he was sent. Raises RuntimeError as `send` does."""
        if not body or self.disconnected:
            return None
        if self._in_chunks:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif self.response_complete or not self.response_started:
            raise RuntimeError("the application wrote a piece of the body out of its order")
        else:
            self._write(body, last=False)
        return self._flow.drain() if self._flow.write_paused else None

    # ----------------------------------------------------------------------- inside

    def _start(self, status: int, headers: Any) -> None:
        self._expects_continue = False
        lines = [_STATUS_LINES[status]]
        length = closes = None
        for name, value in (*self._default_headers, *headers):
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                closes = b"close" in value.lower()
            lines.append(b"%b: %b\r\n" % (name, value))
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if length is not None:
            self._left = length
        elif self.scope["method"] != "HEAD" and status not in (204, 304):
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise RuntimeError("a header of the answer holds a line break")
        self.response_started = True
        self._head = head + b"\r\n"
        if self.scope["method"] == "HEAD":  # its answer is a head and nothing else
            self._flush(b"")

    def _write(self, body: bytes, *, last: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._left = 0
        elif self._chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._flush(data + _LAST_CHUNK if last else data)
            self._in_chunks = not last
        else:
            self._left -= len(body)
            if self._left < 0 or (last and self._left):
                raise RuntimeError("the answer has another length than its head declares")
            self._flush(body)
        if last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self._on_response()

    def _flush(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)

    async def _break_off(self) -> None:
        """A plain 500 if nothing was sent; else what was sent ends here, so that nobody takes it for the whole."""
        if self.response_started:
            self._flush(b"")
            self.transport.close()
        elif not self.disconnected:
            await self.send({"type": "http.response.start", "status": 500, "headers": _BROKEN})
            await self.send({"type": "http.response.body", "body": b"Internal Server Error"})
