"""What systemd is told by a service of ``Type=notify``: that it is ready, drains, and lives (sd_notify's protocol)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from firsttoken.core.clock import now_ns

_NS_PER_US = 1000


class Supervisor:
    """Whoever started this process and wants to hear of it, if anybody does. Never blocks, never raises."""

    def __init__(self, address: str = "", watchdog_us: int = 0) -> None:
        self._socket: socket.socket | None = None
        # Twice within the time after which it would be taken for hung.
        self._every_ns = watchdog_us * _NS_PER_US // 2
        self._told_ns = 0
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            try:
                # "@" stands for the zero byte of an address that is no file's.
                self._socket.connect("\0" + address[1:] if address.startswith("@") else address)
            except OSError:
                self.close()

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int) -> Supervisor:
        """By the variables that systemd sets."""
        meant = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        usec = environ.get("WATCHDOG_USEC", "") if meant else ""
        return cls(environ.get("NOTIFY_SOCKET", ""), int(usec) if usec.isdecimal() else 0)

    def ready(self) -> None:
        self._tell("READY=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """The event loop turns. To be called often; it is told as often as is asked for."""
        if self._every_ns and now_ns() - self._told_ns >= self._every_ns:
            self._told_ns = now_ns()
            self._tell("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, word: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # nobody there, or nobody who reads
                self._socket.send(word.encode())
