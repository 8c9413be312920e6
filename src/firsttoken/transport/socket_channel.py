"""A channel between two processes over a connected Unix socket (a socket pair: nothing listens, nobody else can
connect). The engine's end blocks; the client's end lives on an asyncio loop or, without one, on a reader thread.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from firsttoken.transport.channel import ChannelClosed
from firsttoken.transport.framing import FrameError, FrameReader, frame
from firsttoken.transport.messages import ENCODER, FROM_ENGINE, TO_ENGINE, FromEngine, ToEngine

if TYPE_CHECKING:
    import asyncio

# More than a step says. For a buffer of megabytes the allocator would ask the system at each read.
_READ_BYTES = 1 << 16


class SocketEngineEnd:
    """The engine's end; one thread only."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameReader()
        self._buffer = memoryview(bytearray(_READ_BYTES))  # kept: a new one for each look would cost more than the look
        self._open = True

    def receive(self, timeout: float) -> list[ToEngine]:
        if not self._open:
            raise ChannelClosed
        if timeout > 0:
            select.select([self._sock], [], [], timeout)
        messages: list[ToEngine] = []
        while True:
            try:
                count = self._sock.recv_into(self._buffer)
            except BlockingIOError:
                return messages
            except OSError:
                count = 0
            if not count:
                self._open = False
                if messages:
                    return messages
                raise ChannelClosed
            try:
                payloads = self._frames.feed(bytes(self._buffer[:count]))
                messages += [TO_ENGINE.decode(payload) for payload in payloads]
            except (FrameError, msgspec.DecodeError) as error:
                self._open = False
                raise ChannelClosed from error
            if count < _READ_BYTES:
                return messages

    def send(self, message: FromEngine) -> None:
        data = memoryview(frame(ENCODER.encode(message)))
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                # The API process reads all the time; a full socket means that it is slow or gone, and poll says which.
                select.select([], [self._sock], [], 1.0)
            except OSError as error:
                self._open = False
                raise ChannelClosed from error

    def close(self) -> None:
        self._open = False
        self._sock.close()


class SocketClientEnd:
    """The front end's end. ``listen`` inside a running asyncio loop reads there; elsewhere on a daemon thread.

    ``send`` writes at once when the socket takes it, and queues the rest for the loop: it never blocks.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameReader()
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        self._on_close: Callable[[], None] | None = None
        self._closed = False

    def listen(self, on_message: Callable[[FromEngine], None], on_close: Callable[[], None]) -> None:
        import asyncio  # takes longer than to start an engine, which needs an unused end only

        self._on_message, self._on_close = on_message, on_close
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            threading.Thread(target=self._read_forever, name="firsttoken-channel", daemon=True).start()
        else:
            self._loop.add_reader(self._sock, self._read_ready)

    def send(self, message: ToEngine) -> None:
        data = memoryview(frame(ENCODER.encode(message)))
        with self._lock:
            if self._closed:
                raise ChannelClosed
            if not self._backlog:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise ChannelClosed from error
            if data:
                self._backlog.append(data)
                if len(self._backlog) == 1:
                    self._start_flushing()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._backlog.clear()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # ------------------------------------------------------------------ writing

    def _start_flushing(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._flush)
        else:
            threading.Thread(target=self._flush_blocking, daemon=True).start()

    def _flush(self) -> None:
        with self._lock:
            if not self._closed:
                self._write_backlog()
            if not self._backlog and self._loop is not None and not self._closed:
                self._loop.remove_writer(self._sock)

    def _write_backlog(self) -> None:
        while self._backlog:
            try:
                sent = self._sock.send(self._backlog[0])
            except BlockingIOError:
                return
            except OSError:
                self._backlog.clear()
                return
            rest = self._backlog[0][sent:]
            if rest:
                self._backlog[0] = rest
            else:
                self._backlog.popleft()

    def _flush_blocking(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._backlog:
                    return
                self._write_backlog()
                if not self._backlog:
                    return
            select.select([], [self._sock], [], 0.1)

    # ------------------------------------------------------------------ reading

    def _read_ready(self) -> None:
        if not self._read_once():
            if self._loop is not None and not self._closed:
                self._loop.remove_reader(self._sock)
            self._end()

    def _read_once(self) -> bool:
        """Read and deliver what is there; False when the engine's end is gone."""
        assert self._on_message is not None
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            messages = [FROM_ENGINE.decode(payload) for payload in self._frames.feed(data)]
        except (FrameError, msgspec.DecodeError):
            return False
        for message in messages:
            self._on_message(message)
        return True

    def _read_forever(self) -> None:
        while not self._closed:
            try:
                readable, _, _ = select.select([self._sock], [], [], 0.5)
            except (OSError, ValueError):
                break
            if readable and not self._read_once():
                break
        self._end()

    def _end(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()
