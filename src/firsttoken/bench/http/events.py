"""Server-sent events out of pieces that may be cut anywhere.

After the WHATWG HTML standard, section 9.2.6 (interpreting an event stream), without ids and retry times.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_EVENT_BYTES = 8 << 20


class Event(NamedTuple):
    """``data`` are the event's data lines, joined by newlines."""

    name: bytes
    data: bytes


class EventTooLong(Exception):
    """More than `MAX_EVENT_BYTES` without the blank line that ends an event."""


class EventStream:
    """Keeps what is left over until its event is complete."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def inside(self) -> bool:
        """True when the bytes so far end within an event."""
        return bool(self._rest.strip())

    def feed(self, piece: bytes) -> list[Event]:
        """The events that ``piece`` completes, those without data left out. Raises `EventTooLong`."""
        text = self._rest + piece if self._rest else piece
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # the first half of a line's end, or all of it
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of them
                events.append(Event(b"", block[6:]))
            elif (event := _event(block)) is not None:
                events.append(event)
        return events


def _event(block: bytes) -> Event | None:
    name, data = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(name, b"\n".join(data)) if data else None
