"""One HTTP/1 connection: uvicorn's protocol, held to what a latency server needs and a hostile network allows."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from firsttoken.core.clock import now_ns
from firsttoken.server.access import log_unreadable
from firsttoken.server.call import BODY_READ, RECEIVED_NS, WATCH, WRITE
from firsttoken.server.connections import Connections
from firsttoken.server.errors import ApiError
from firsttoken.server.exchange import Exchange

# A request line with its headers. Others allow 8 to 32 KiB.
MAX_HEAD_BYTES = 64 * 1024
# Each is looked through several times. Browsers and proxies send some dozens.
MAX_HEADERS = 256
_ASGI = {"version": "3.0", "spec_version": "2.3"}
# A target that is a path and nothing else, as it nearly always is: there is nothing to parse in it.
_PATH = re.compile(rb"(?:/[A-Za-z0-9_.-]+)+")
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class Protocol(HttpToolsProtocol):
    """What differs from uvicorn's:

    - A request and its answer are an `Exchange`, and its scope is made in one go.
    - Writes go to the socket at once. uvloop would keep them until every task that is ready has run: the first token
      of one stream would wait for the next tokens of all the others.
    - A request's head is bounded in bytes and headers (431), and in time by the keep-alive limit, from the connection's
      start.
    - An offer to upgrade (``Upgrade: h2c``, which Java's client makes by default) is not taken, and the request is
      read as if there were none. uvicorn would drop its body.
    - When the connection is lost all its calls hear of it, not only the newest: the one that runs may have another
      pipelined behind it.
    - What is not HTTP gets an error in OpenAI's shape, once what came before it is answered: in the middle of a stream,
      or in its place, it would be taken for a part of it.
    """

    _calls: tuple[Exchange, ...] = ()  # those whose answer is not complete
    _heading = True  # the next byte belongs to a head
    _head_fed = 0  # bytes of chunks that lay within this head
    _head_parsed = 0  # bytes of its URL and headers so far
    _received_ns = 0  # when the first byte of the request was read
    _declined = False  # the head that was just read offers to upgrade
    _head_timer: asyncio.TimerHandle | None = None
    _unreadable = False  # something could not be read, and what follows it is not looked at
    _last_word = b""  # what is said of it
    _address: str | None = None  # under which it is counted among the server's connections
    _rest_timer: asyncio.TimerHandle | None = None  # while a body comes of a request that is answered

    def __init__(self, *args: Any, connections: Connections | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = connections

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport, counted: str | None = None
    ) -> None:
        """``counted``: the address under which it is among the server's connections already."""
        super().connection_made(transport)
        # TLS has a buffer of its own, empty at first, and to it 0 would mean that it is full: a byte is the least.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0)
        self._address = counted
        if self._limits is not None and counted is None:
            address = self.client[0] if self.client else ""
            if (error := self._limits.enter(address)) is not None:
                self._turn_away(error)
                return
            self._address = address
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_rest_timer()
        if self._limits is not None and self._address is not None:
            self._limits.leave(self._address)
            self._address = None
        super().connection_lost(exc)
        for call in self._unfinished():
            call.lost()

    def data_received(self, data: bytes) -> None:
        if self._unreadable:
            return
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

    def _turn_away(self, error: ApiError) -> None:
        """Answer before anything is read, and close."""
        self._unreadable = True
        self.transport.write(_closing_answer(error))
        self.transport.close()
        log_unreadable(error.status)

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
        """Answer what cannot be read, when its turn has come, and close."""
        if self.transport.is_closing() or self._unreadable:
            return
        self._unreadable = True
        error = ApiError(400, msg, code="invalid_http")
        if max(self._head_fed, self._head_parsed) > MAX_HEAD_BYTES:
            message = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
            error = ApiError(431, message, code="headers_too_large")
        elif len(self.headers) > MAX_HEADERS:
            error = ApiError(431, f"there are more than {MAX_HEADERS} headers", code="headers_too_large")
        self._last_word = _closing_answer(error)
        self._stop_timer()
        log_unreadable(error.status)
        newest = self._calls[-1] if self._calls else None
        if newest is not None and newest.more_body and not newest.response_complete:
            newest.lost()  # it is its body that cannot be read
            if newest.response_started:
                self._last_word = b""
        self._say_last_word()

    def _say_last_word(self) -> None:
        """If all requests before it have been answered."""
        if self.transport.is_closing() or any(not call.disconnected for call in self._unfinished()):
            return
        if self._last_word:
            self.transport.write(self._last_word)
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unreadable:
            self._say_last_word()

    # -------------------------------------------------------------- from the parser

    def on_message_begin(self) -> None:
        self._received_ns = now_ns()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._heading = True
        self._head_fed = self._head_parsed = 0

    def on_url(self, url: bytes) -> None:
        self._measure(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("there are too many headers")

    def on_headers_complete(self) -> None:
        self._heading = False
        self._stop_timer()
        method = self.parser.get_method()
        self._declined = self.parser.should_upgrade() and method != b"CONNECT"
        if self._declined:
            return
        version = self.parser.get_http_version()
        before = self.cycle
        exchange = Exchange(
            self._scope(method.decode("ascii"), version),
            self.transport,
            self.flow,
            default_headers=self.server_state.default_headers,
            expects_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        exchange.scope[WATCH] = exchange.watch
        exchange.scope[WRITE] = exchange.write
        self.cycle = exchange  # type: ignore[assignment]  # as much of a cycle as uvicorn needs
        self._calls = (*self._unfinished(), exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        if self._declined:
            return
        if self.cycle.response_complete:
            if self._rest_timer is None:  # however slowly it drips, it ends
                self._rest_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._stop_rest_timer()
        if self._declined or self.cycle.response_complete:
            return
        self.cycle.scope[BODY_READ] = True  # type: ignore[literal-required]  # a key of our own, as ASGI allows
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def _scope(self, method: str, version: str) -> dict[str, Any]:
        path, query = self.url, b""
        if _PATH.fullmatch(path) is None:
            parsed = httptools.parse_url(path)
            path, query = parsed.path, parsed.query or b""
        text = path.decode("ascii")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "method": method,
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": query,
            RECEIVED_NS: self._received_ns,
        }

    def _measure(self, size: int) -> None:
        self._head_parsed += size
        if self._head_parsed > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser turns it into its own error

    # ------------------------------------------------------------------------ inside

    def _unfinished(self) -> list[Exchange]:
        return [call for call in self._calls if not call.response_complete]

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._no_head)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _no_head(self) -> None:
        self._head_timer = None
        if self._unfinished():
            self._start_timer()  # half a pipelined request must not cut the answer to the one before
        else:
            self.transport.close()


def _closing_answer(error: ApiError) -> bytes:
    """The bytes of an error behind which the connection is closed."""
    body = error.body()
    lines = [b"HTTP/1.1 %d %b" % (error.status, _REASONS[error.status]), b"content-type: application/json"]
    lines += [b"content-length: %d" % len(body), b"connection: close"]
    lines += [b"%b: %b" % header for header in error.headers]
    return b"\r\n".join([*lines, b"", body])
