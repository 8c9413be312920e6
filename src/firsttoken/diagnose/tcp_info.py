"""What Linux knows of a TCP connection (``struct tcp_info`` of linux/tcp.h; fields are only ever added to it)."""

from __future__ import annotations

import socket
import struct
import sys

from firsttoken.diagnose.sample import Link

_SIZE = 256
_TOTAL_RETRANS, _BYTES_RECEIVED, _MIN_RTT, _OUT_OF_ORDER = 100, 128, 148, 224
_UNKNOWN_RTT = 0xFFFFFFFF


def link(connection: socket.socket) -> Link:
    """The facts so far; those that this system does not tell are left out."""
    raw = _read(connection)
    rtt_us = _u32(raw, _MIN_RTT)
    return Link(
        rtt_ms=None if rtt_us in (None, 0, _UNKNOWN_RTT) else rtt_us / 1e3,
        retransmits=_u32(raw, _TOTAL_RETRANS) or 0,
        out_of_order=_u32(raw, _OUT_OF_ORDER) or 0,
    )


def bytes_received(connection: socket.socket) -> int | None:
    raw = _read(connection)
    found: tuple[int] | None = (
        struct.unpack_from("=Q", raw, _BYTES_RECEIVED) if len(raw) >= _BYTES_RECEIVED + 8 else None
    )
    return None if found is None else found[0]


def _read(connection: socket.socket) -> bytes:
    if not sys.platform.startswith("linux"):
        return b""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return b""


def _u32(raw: bytes, offset: int) -> int | None:
    if len(raw) < offset + 4:
        return None
    number: int = struct.unpack_from("=I", raw, offset)[0]
    return number
