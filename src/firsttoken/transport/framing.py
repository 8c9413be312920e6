"""Length-prefixed frames on a byte stream: 4 bytes little-endian, then the payload."""

from __future__ import annotations

import struct

# One message holds at most every prompt of one Submit or every delta of one step; larger is a broken peer.
MAX_FRAME_BYTES = 1 << 30

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class FrameError(Exception):
    """The stream does not hold a frame; the peer is broken and the channel must be closed."""


def frame(payload: bytes) -> bytes:
    """The bytes to send for one payload."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream, fed in pieces of any size, into payloads. Linear in the bytes fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """All payloads completed by ``data``. Raises `FrameError` on an absurd length."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        at = 0
        while len(buffer) - at >= HEADER_BYTES:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = at + HEADER_BYTES + size
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[at + HEADER_BYTES : end]))
            at = end
        if at:
            del buffer[:at]
        return payloads
