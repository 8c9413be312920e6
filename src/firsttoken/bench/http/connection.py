"""A client's HTTP/1.1 connection that takes the time of what comes before it looks at it.

Many streams bring their tokens at the same instant, and to parse one takes longer than to stamp it. So `data_received`
only stamps; the `Batch` parses once the loop has read all sockets that had something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from firsttoken.bench.http.answer import StreamedAnswer
from firsttoken.core.clock import now_ns

# Of an answer that is no event stream; only its first words are of interest.
MAX_PLAIN_BYTES = 1 << 20


@dataclass(slots=True)
class Exchange:
    """One request on a connection, and what came back. ``plain`` is the body of an answer that is no event stream.

    ``fault`` says why the transfer ended before the answer did, None when it ended well.
    """

    done: asyncio.Future[None]
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)
    status: int = 0
    content_type: str = ""
    plain: bytearray = field(default_factory=bytearray)
    fault: str | None = None
    first_byte_ns: int = 0

    @property
    def streams(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    def finish(self, fault: str | None = None) -> None:
        if not self.done.done():
            self.fault = fault
            self.done.set_result(None)


class Batch:
    """Connections that have something to parse. ``longest_ns`` is the longest that parsing kept the loop from reading
    the next sockets, ``total_ns`` all of it."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self.total_ns = 0
        self._waiting: list[Connection] = []

    def add(self, connection: Connection) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._parse)
        self._waiting.append(connection)

    def _parse(self) -> None:
        waiting, self._waiting = self._waiting, []
        began = now_ns()
        for connection in waiting:
            connection.parse()
        took = now_ns() - began
        self.total_ns += took
        self.longest_ns = max(self.longest_ns, took)


class Connection(asyncio.Protocol):
    """One request at a time. ``on_free`` is told when it can carry the next one."""

    def __init__(self, batch: Batch, on_free: Callable[[Connection], None]) -> None:
        self.lost = False
        self.used = False  # an answer was read from it to its end
        self._batch = batch
        self._on_free = on_free
        self._transport: asyncio.Transport | None = None
        self._pieces: list[tuple[int, bytes]] = []
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._stamp = 0
        self._until_close = True  # neither a length nor chunks say where the body ends

    # ---------------------------------------------------------------- the caller

    def send(self, request: bytes, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._until_close = True
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def abandon(self) -> None:
        """No more of this exchange: the connection cannot be used again."""
        self._exchange = None
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------------- the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        stamp = now_ns()
        if not self._pieces:
            self._batch.add(self)
        self._pieces.append((stamp, data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._pieces and not self.lost:
            self._batch.add(self)
        self.lost = True

    def parse(self) -> None:
        pieces, self._pieces = self._pieces, []
        for stamp, data in pieces:
            exchange = self._exchange
            if exchange is None or self._parser is None:  # bytes that nobody asked for
                self.abandon()
                return
            self._stamp = stamp
            exchange.first_byte_ns = exchange.first_byte_ns or stamp
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self._end(f"not HTTP/1.1: {error}")
                self.abandon()
                return
        if self.lost and self._exchange is not None:
            self._closed(self._exchange)

    def _closed(self, exchange: Exchange) -> None:
        whole_by_closing = self._until_close and exchange.status != 0
        if exchange.first_byte_ns == 0:
            self._end("the connection was closed before any answer")
        else:
            self._end(None if whole_by_closing else "the answer was cut: the connection was closed before its end")

    def _end(self, fault: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.finish(fault)

    # ---------------------------------------------------------------- the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._until_close = False
        elif name == b"content-type" and self._exchange is not None:
            self._exchange.content_type = value.decode("latin-1").partition(";")[0].strip().lower()

    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._parser is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.streams:
            exchange.answer.feed(self._stamp, body)
        elif len(exchange.plain) < MAX_PLAIN_BYTES:
            exchange.plain += body[:MAX_PLAIN_BYTES]

    def on_message_complete(self) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            return
        if exchange.status < 200:  # 100 Continue and its like come before the answer
            self._until_close, exchange.status = True, 0
            return
        self.used = True
        keep = parser.should_keep_alive() and not self.lost
        self._end(None)
        if keep:
            self._on_free(self)
        elif self._transport is not None:
            self._transport.close()
