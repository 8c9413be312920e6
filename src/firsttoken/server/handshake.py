"""The first thing that a connection over TLS does. Whoever connects and says nothing is counted, and not waited for.

asyncio's own servers tell their protocol of a connection once it is secured: until then nobody counts it, and for a
minute each it holds a file.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, cast

from firsttoken.server.connections import Connections
from firsttoken.server.protocol import Protocol

# A handshake takes two round trips and some milliseconds.
HANDSHAKE_S = 10.0


class Handshake(asyncio.Protocol):
    """Agrees on ``tls``, then hands the connection over to ``inner``, with what has come meanwhile."""

    def __init__(self, inner: Protocol, tls: ssl.SSLContext, limits: Connections | None) -> None:
        self._inner = inner
        self._tls = tls
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self._ended = self._lost = False

    # -------------------------------------------------------------- from the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        counted = self._limits is None or self._limits.enter(address) is None
        # One too many is told so once it can be, if these are few.
        if not counted and self._limits is not None and not self._limits.enter_to_be_told():
            self._transport.abort()
            return
        self._inner.connections.add(self)  # type: ignore[arg-type]  # those that uvicorn ends with itself
        shaking = self._inner.loop.start_tls(
            self._transport, self, self._tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
        )
        # Its first step now, not by a task a moment later: the caller's first bytes could come before.
        waited = shaking.send(None)
        waited.add_done_callback(lambda _: self._shaken(shaking, address if counted else None))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    def shutdown(self) -> None:
        """The server ends."""
        if self._transport is not None:
            self._transport.abort()

    # -------------------------------------------------------------- inside

    def _shaken(self, shaking: Coroutine[Any, Any, asyncio.Transport | None], address: str | None) -> None:
        secured: asyncio.Transport | None = None
        try:
            shaking.send(None)
        except StopIteration as done:
            secured = done.value
        except (OSError, asyncio.CancelledError):  # what came was no handshake, or nothing did
            pass
        self._inner.connections.discard(self)
        if self._limits is not None and address is None:
            self._limits.leave_told()
        gone = self._lost or self._transport is None or self._transport.is_closing()
        if secured is not None and not gone:
            self._hand_over(secured, address)
        elif self._limits is not None and address is not None:
            self._limits.leave(address)

    def _hand_over(self, secured: asyncio.Transport, address: str | None) -> None:
        inner = self._inner
        secured.set_protocol(inner)
        inner.connection_made(secured, address)
        if self._early:
            inner.data_received(self._early)
        if self._ended:
            inner.eof_received()


def over_tls(tls: ssl.SSLContext, connections: Connections | None, **options: Any) -> Handshake:
    """What a server makes for each connection."""
    return Handshake(Protocol(connections=connections, **options), tls, connections)
