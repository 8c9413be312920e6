"""``--server granian``: the application behind granian's HTTP/1 and HTTP/2, in place of uvicorn with our own protocol.

Its connections live on a thread of Rust, and calls come to this event loop one by one. What our protocol does beyond
ASGI is lost with it: when a request's first byte was read, limits by address, and errors in OpenAI's shape for what is
not HTTP (docs/operations.md).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings, HTTP2Settings
from granian.net import SocketHolder  # type: ignore[attr-defined]  # its stubs lag behind
from granian.server.embed import Server

from firsttoken.server.config import ServerConfig
from firsttoken.server.listener import BACKLOG
from firsttoken.server.protocol import MAX_HEAD_BYTES

if TYPE_CHECKING:
    from firsttoken.server.app import FirstTokenApp

# A peer that does not answer a ping of HTTP/2 for so long is gone.
_PING_EVERY_MS, _PING_ANSWER_S = 30_000, 20


class GranianServer(Server):
    """Has of uvicorn's server what starts and ends it: `serve`, ``started``, ``should_exit``."""

    def __init__(self, app: FirstTokenApp, config: ServerConfig, keep_alive_s: float) -> None:
        self._listener: socket.socket | None = None
        self.started = False
        certificate = config.ssl_certfile
        super().__init__(
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            websockets=False,
            backlog=BACKLOG,
            backpressure=config.max_connections,
            http1_settings=HTTP1Settings(header_read_timeout=int(keep_alive_s * 1000), max_buffer_size=MAX_HEAD_BYTES),
            http2_settings=HTTP2Settings(
                keep_alive_interval=_PING_EVERY_MS, keep_alive_timeout=_PING_ANSWER_S, max_headers_size=MAX_HEAD_BYTES
            ),
            log_enabled=False,
            ssl_cert=None if certificate is None else Path(certificate),
            ssl_key=None if certificate is None else Path(config.ssl_keyfile or certificate),
            ssl_protocol_min=SSLProtocols.tls12,
        )

    def _init_shared_socket(self) -> None:
        """Ours, which is bound already."""
        assert self._listener is not None
        self._shd = SocketHolder(os.dup(self._listener.fileno()), False, BACKLOG)  # type: ignore[call-arg,assignment]

    @property
    def should_exit(self) -> bool:
        return bool(self.interrupt_signal)

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self.stop()  # type: ignore[no-untyped-call]

    async def serve(self, sockets: Sequence[socket.socket]) -> None:  # type: ignore[override]
        [self._listener] = sockets
        # It writes the head of an answer by itself, and the kernel would keep the first token back until the caller has
        # acknowledged that: 40 ms. Connections inherit this.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = asyncio.ensure_future(super().serve())
        await asyncio.sleep(0)
        self.started = True
        await serving
