"""One HTTP/1 connection: uvicorn's protocol, held to what a latency server needs and a hostile network allows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from firsttoken.core.clock import now_ns
from firsttoken.server.access import log_unreadable
from firsttoken.server.call import BODY_READ, RECEIVED_NS
from firsttoken.server.errors import ApiError

# A request line with its headers. Others allow 8 to 32 KiB.
MAX_HEAD_BYTES = 64 * 1024
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class Protocol(HttpToolsProtocol):
    """What differs from uvicorn's:

    - Writes go to the socket at once. uvloop would keep them until every task that is ready has run: the first token
      of one stream would wait for the next tokens of all the others.
    - The head of an answer goes out with the first bytes of its body.
    - A request's head is bounded in bytes (431), and in time by the keep-alive limit, from the connection's start.
    - An offer to upgrade (``Upgrade: h2c``, which Java's client makes by default) is not taken, and the request is
      read as if there were none. uvicorn would drop its body.
    - When the connection is lost all its calls hear of it, not only the newest: the one that runs may have another
      pipelined behind it.
    - What is not HTTP gets an error in OpenAI's shape.
    """

    _calls: tuple[Any, ...] = ()  # uvicorn's cycles whose answer is not complete
    _heading = True  # the next byte belongs to a head
    _head_fed = 0  # bytes of chunks that lay within this head
    _head_parsed = 0  # bytes of its URL and headers so far
    _declined = False  # the head that was just read offers to upgrade
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        for call in self._unfinished():
            call.transport = self.transport
            call.disconnected = True
            call.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        heading = self._heading
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if not self._declined:  # CONNECT
                self.send_400_response("this server is no proxy")
                return
            self._read_on(data[stopped.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("this is not an HTTP/1.1 request that the server can read")
            return
        if heading and self._heading:
            self._head_fed += len(data)
            if self._head_fed > MAX_HEAD_BYTES:
                self.send_400_response("")
        if self._heading and self._head_timer is None:  # most heads come whole and need no timer
            self._start_timer()

    def _read_on(self, rest: bytes) -> None:
        """Read the request again, without the offer to upgrade: the parser takes what follows one for not HTTP."""
        self._declined = False
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # as uvicorn does: httptools before 0.6.3 has no such setting
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read, and close."""
        if self.transport.is_closing():
            return
        error = ApiError(400, msg, code="invalid_http")
        if max(self._head_fed, self._head_parsed) > MAX_HEAD_BYTES:
            message = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
            error = ApiError(431, message, code="headers_too_large")
        body = error.body()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % (error.status, _REASONS[error.status], len(body))
            + body
        )
        self.transport.close()
        log_unreadable(error.status)

    # -------------------------------------------------------------- from the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[RECEIVED_NS] = now_ns()  # type: ignore[literal-required]  # a key of our own, as ASGI allows
        self._heading = True
        self._head_fed = self._head_parsed = 0

    def on_url(self, url: bytes) -> None:
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heading = False
        self._stop_timer()
        self._declined = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._declined:
            super().on_headers_complete()
            if self.parser.get_method() != b"HEAD":  # whose answers are heads and nothing else
                self.cycle.transport = _Opening(self.cycle)  # type: ignore[assignment]  # as much of one as it needs
            self._calls = (*self._unfinished(), self.cycle)

    def on_message_complete(self) -> None:
        if not self._declined:
            self.scope[BODY_READ] = True  # type: ignore[literal-required]
            super().on_message_complete()

    def _measure(self, size: int) -> None:
        self._head_parsed += size
        if self._head_parsed > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser turns it into its own error

    # ------------------------------------------------------------------------ inside

    def _unfinished(self) -> list[Any]:
        return [call for call in self._calls if not call.response_complete]

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._no_head)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _no_head(self) -> None:
        self._head_timer = None
        if self._unfinished():
            self._start_timer()  # half a pipelined request must not cut the answer to the one before
        else:
            self.transport.close()


class _Opening:
    """Stands in for the transport of a cycle (uvicorn's of one request) until the answer's first bytes have gone out:
    keeps the head and writes it with them, since a write to a socket takes longer than all else that a token needs."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # 100 Continue
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.write(self._head)
        self._transport.close()
