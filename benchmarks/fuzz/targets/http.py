"""Bytes on a connection: answers that are HTTP, the same for any pieces, and no exception of the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import h11
import uvicorn
from uvicorn.server import ServerState

from benchmarks.fuzz.pieces import Pieces
from firsttoken.server.protocol import Protocol


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self.written += data

    def close(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _measure(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = f"{scope['method']} {scope['path']} {size}".encode("utf-8", "replace")
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


_CONFIG = uvicorn.Config(_measure, loop="none", http=Protocol, lifespan="off", log_config=None, interface="asgi3")
_CONFIG.load()


# One loop for all inputs: to make one takes longer than most of them.
_RUNNER = asyncio.Runner()


async def _talk(pieces: Sequence[bytes]) -> tuple[bytes, bool]:
    """What one connection answers to the pieces, and whether it hung up."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    protocol = Protocol(config=_CONFIG, server_state=ServerState(), app_state={})
    transport = _Transport()
    protocol.connection_made(cast(asyncio.Transport, transport))
    for piece in pieces:
        if transport.is_closing():
            break
        protocol.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)
    for _ in range(20):  # the rest of those that wait behind each other
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    protocol._unset_keepalive_if_required()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not failures, failures
    return bytes(transport.written), transport.is_closing()


def connection(data: bytes) -> None:
    """The input at once, and cut: the same answers."""
    pieces = Pieces(data)
    cuts = pieces.below(8)
    sizes = Pieces(pieces.take(cuts))
    raw = pieces.rest()
    whole, closed = _RUNNER.run(_talk([raw]))
    cut, closed_cut = _RUNNER.run(_talk(list(sizes.cut(raw, cuts))))
    assert (cut, closed_cut) == (whole, closed), f"{cut!r} is not {whole!r}"
    _check(whole)


def _check(written: bytes) -> None:
    """Whole answers, one after the other, as a strict reader takes them."""
    while written:
        reader = h11.Connection(h11.CLIENT)
        # Which request it answers decides whether there is a body; all but those to HEAD have one here.
        reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        reader.send(h11.EndOfMessage())
        head, _, rest = written.partition(b"\r\n\r\n")
        reader.receive_data(written)
        event = reader.next_event()
        if isinstance(event, h11.InformationalResponse):
            written = rest
            continue
        assert isinstance(event, h11.Response), event
        if rest.startswith((b"HTTP/1.1 ", b"")) and _is_head(head, rest):
            written = rest
            continue
        while not isinstance(reader.next_event(), h11.EndOfMessage):
            pass
        written = bytes(reader.trailing_data[0])


def _is_head(head: bytes, rest: bytes) -> bool:
    """Whether what follows the headers is another answer, as behind one to HEAD."""
    return b"content-length" in head and (not rest or rest.startswith(b"HTTP/1.1 "))
