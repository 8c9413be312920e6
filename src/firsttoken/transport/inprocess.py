"""A channel inside one process: the same messages, handed over as objects (they are frozen, so sharing is safe)."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from firsttoken.transport.channel import ChannelClosed
from firsttoken.transport.messages import FromEngine, ToEngine


class _Closed:
    """Marks the end of a queue."""


class InProcessEngineEnd:
    def __init__(self, inbox: queue.SimpleQueue[ToEngine | _Closed], client: InProcessClientEnd) -> None:
        self._inbox = inbox
        self._client = client
        self._open = True

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        wait = timeout
        while self._open:
            try:
                message = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return messages
            if isinstance(message, _Closed):
                self._open = False
                break
            messages.append(message)
            wait = 0
        if messages:
            return messages
        raise ChannelClosed

    def send(self, message: FromEngine) -> None:
        if not self._open:
            raise ChannelClosed
        self._client.deliver(message)

    def close(self) -> None:
        self._open = False
        self._client.deliver(_Closed())


class InProcessClientEnd:
    """``listen`` inside a running asyncio loop delivers there; elsewhere on the engine's thread."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[ToEngine | _Closed] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._early: list[FromEngine | _Closed] | None = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        self._on_close: Callable[[], None] | None = None
        self._closed = False

    def send(self, message: ToEngine) -> None:
        if self._closed:
            raise ChannelClosed
        self._inbox.put(message)

    def listen(self, on_message: Callable[[FromEngine], None], on_close: Callable[[], None]) -> None:
        self._on_message, self._on_close = on_message, on_close
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        with self._lock:
            early, self._early = self._early or [], None
            for message in early:
                self._dispatch(message)

    def deliver(self, message: FromEngine | _Closed) -> None:
        """Called by the engine's end, on the engine's thread."""
        with self._lock:
            if self._early is not None:
                self._early.append(message)
            else:
                self._dispatch(message)

    def _dispatch(self, message: FromEngine | _Closed) -> None:
        if self._loop is None:
            self._hand_over(message)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_over, message)

    def _hand_over(self, message: FromEngine | _Closed) -> None:
        if self._closed:
            return
        if isinstance(message, _Closed):
            if self._on_close is not None:
                on_close, self._on_close = self._on_close, None
                on_close()
        elif self._on_message is not None:
            self._on_message(message)

    def close(self) -> None:
        self._closed = True
        self._inbox.put(_Closed())


def in_process_channel() -> tuple[InProcessEngineEnd, InProcessClientEnd]:
    """Both ends of a new channel."""
    client = InProcessClientEnd()
    return InProcessEngineEnd(client._inbox, client), client
