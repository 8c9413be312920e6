"""The two ends of a channel. Every implementation keeps order and loses nothing while both ends live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from firsttoken.transport.messages import FromEngine, ToEngine


class EngineEnd(Protocol):
    """The engine's end: plain blocking calls, never asyncio."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """Messages that have arrived; waits up to ``timeout`` seconds for the first (0: do not wait).

        Raises `ChannelClosed` when the other end is gone and nothing is left to read.
        """

    def send(self, message: FromEngine) -> None:
        """Hand over one message. Raises `ChannelClosed` when the other end is gone."""

    def close(self) -> None: ...


class ClientEnd(Protocol):
    """The front end's end. ``send`` may be called from any thread and never blocks the event loop."""

    def send(self, message: ToEngine) -> None: ...

    def listen(self, on_message: Callable[[FromEngine], None], on_close: Callable[[], None]) -> None:
        """Deliver messages from now on, each by one call of ``on_message``; ``on_close`` once, at the end."""

    def close(self) -> None: ...


class EngineHandle(Protocol):
    """A started engine, on a thread or in a process. The first message on ``client`` is `Ready` or `Failed`.

    ``pid`` is its process, None when it shares this one.
    """

    @property
    def client(self) -> ClientEnd: ...

    @property
    def pid(self) -> int | None: ...

    def alive(self) -> bool: ...

    def how_it_ended(self) -> str:
        """In words, as "its process ended with exit code 1"; "" while it runs, and where nobody knows."""

    def stop(self, timeout_s: float) -> None:
        """Ask it to leave, wait up to ``timeout_s``, then end it by force where that is possible. Idempotent."""


class LaunchedEngine(EngineHandle, Protocol):
    """One whose start is accounted for: it was asked for at ``launched_ns``."""

    @property
    def launched_ns(self) -> int: ...


class ChannelClosed(Exception):
    """The other end is gone."""
