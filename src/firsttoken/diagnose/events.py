"""Server-sent events out of a stream of bytes (WHATWG HTML, "Server-sent events": fields other than data are left)."""

from __future__ import annotations


class EventReader:
    """Feed it bytes; it gives the data of every event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, raw: bytes) -> list[bytes]:
        lines = (self._rest + raw).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
