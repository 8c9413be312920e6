"""Connections to one server: as many as there are requests at once, each used again when it is free."""

from __future__ import annotations

import asyncio
import socket
import ssl
import weakref

from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.http.connection import Batch, Connection, Exchange
from firsttoken.bench.http.target import Target
from firsttoken.core.address import is_without_tls
from firsttoken.core.clock import NS_PER_MS, now_ns

TIME_OUT = "time-out"
NO_CONNECTION = "no connection"
# So many connections are opened at once ahead of a load: more would overflow a server's queue of new ones.
_OPENED_AT_ONCE = 50


class Pool:
    """Of a running event loop. ``connect_ms`` are the times to open each connection, TLS included; ``reopened`` how
    often one that lay idle had been closed by the server when a request was sent on it."""

    def __init__(self, target: Target) -> None:
        self.batch = Batch()
        self.connect_ms: list[float] = []
        self.reopened = 0
        self._target = target
        self._tls = target.tls_context()
        self._idle: list[Connection] = []
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._address: str | None = None

    async def resolve(self) -> str:
        """The first of the server's addresses that takes a connection. Raises `BenchFailed`."""
        target = self._target
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise BenchFailed(f"{target.host} has no address: {error.strerror or error}") from None
        why = "no address"
        for *_, address in found:
            self._address = str(address[0])
            try:
                self._idle.append(await self._connect())
            except OSError as error:
                why = connect_fault(error)
            else:
                return self._address
        raise BenchFailed(f"{target.url}: {why}. Is the server running there?")

    async def open(self, count: int) -> None:
        """Have ``count`` connections idle, as far as the server takes them."""
        while (missing := count - len(self._idle)) > 0:
            made = await asyncio.gather(
                *(self._connect() for _ in range(min(missing, _OPENED_AT_ONCE))), return_exceptions=True
            )
            self._idle += [one for one in made if isinstance(one, Connection)]
            if not all(isinstance(one, Connection) for one in made):
                return

    async def ask(self, request: bytes, timeout_s: float) -> Exchange:
        """Send ``request`` and wait for the end of its answer, or of the time. Raises nothing that the server does."""
        exchange = Exchange(asyncio.get_running_loop().create_future())
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection = self._free() or await self._connect()
                    connection.send(request, exchange)
                    await exchange.done
                    if not (exchange.fault and connection.used and exchange.first_byte_ns == 0):
                        return exchange
                    # The server closed the idle connection just then: nothing of the request was done.
                    self.reopened += 1
                    exchange = Exchange(asyncio.get_running_loop().create_future())
        except TimeoutError:
            if connection is not None:
                connection.abandon()
            exchange.fault = TIME_OUT
        except OSError as error:
            exchange.fault = connect_fault(error)
        return exchange

    def close(self) -> None:
        for connection in list(self._all):
            connection.abandon()
        self._idle.clear()

    def _free(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
        return None

    async def _connect(self) -> Connection:
        began = now_ns()
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self.batch, self._idle.append),
            self._address or self._target.host,
            self._target.port,
            ssl=self._tls,
            server_hostname=self._target.host if self._tls else None,
        )
        self.connect_ms.append((now_ns() - began) / NS_PER_MS)
        self._all.add(connection)
        return connection


def connect_fault(error: OSError) -> str:
    """Why there was no connection, in words that are the same each time."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return f"{NO_CONNECTION}: the certificate is not trusted ({why}): name its authority with --ca-file"
    if is_without_tls(error):
        return f"{NO_CONNECTION}: it does not speak TLS (https), try http://"
    if isinstance(error, ssl.SSLError):
        return f"{NO_CONNECTION}: TLS failed ({error.reason})"
    return f"{NO_CONNECTION}: {error.strerror or type(error).__name__}"
