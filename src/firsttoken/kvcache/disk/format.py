"""The file of one shard: a header of whole pages, and the payload right after it.

The header holds magic, version, identity, the shard's place in its chain, its token ids, and the payload's length and
CRC-32 (ISO 3309, zlib's). Its last 16 bytes are a BLAKE2b (RFC 7693) over all before them, padding included, so that no
bit of a header can change unseen. The payload is large, so its checksum is a fast one of the standard library that
finds every single and double flipped bit. Both find damage, not forgery: who may write the folder may write anything.

All integers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from firsttoken.kvcache.disk.outcome import Outcome

PAGE = 4096
VERSION = 1
KEY_BYTES = 32
TOKEN_BYTES = 4
MAX_HEADER_BYTES = 64 << 20
# As in PNG: a byte that is no ASCII and both line ends, so that a transfer as text is noticed.
_MAGIC = b"\x89FTKV\r\n\n"
# magic, version, header bytes, start, tokens, payload's CRC-32, payload bytes, identity, key, parent
_FIXED = struct.Struct("<8sIIQIIQ32s32s32s")
_DIGEST_BYTES = 16


class ShardMeta(msgspec.Struct, frozen=True):
    """What a shard's KV was computed from: what makes a hit right.

    ``key`` is the chained hash of its last block and ``parent`` that of the block before its first (the identity's
    root, salt included, at the start of a chain): 32 bytes each. ``start`` tokens come before it; ``tokens`` are its
    own, uint32 little-endian. Raises `ValueError`.
    """

    key: bytes
    parent: bytes
    start: int
    tokens: bytes

    def __post_init__(self) -> None:
        for name, value in (("key", self.key), ("parent", self.parent)):
            if len(value) != KEY_BYTES:
                raise ValueError(f"{name} of a shard must have {KEY_BYTES} bytes, got {len(value)}")
        if self.start < 0:
            raise ValueError(f"a shard starts at token 0 or later, got {self.start}")
        if not self.tokens or len(self.tokens) % TOKEN_BYTES:
            raise ValueError(
                f"a shard's tokens are {TOKEN_BYTES} bytes each, at least one, got {len(self.tokens)} bytes"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def header_bytes(self) -> int:
        """Whole pages."""
        return -(-(_FIXED.size + len(self.tokens) + _DIGEST_BYTES) // PAGE) * PAGE


class Header(msgspec.Struct, frozen=True):
    """What a shard's file says of itself."""

    meta: ShardMeta
    identity: bytes
    payload_bytes: int
    payload_crc: int

    @property
    def file_bytes(self) -> int:
        return self.meta.header_bytes + self.payload_bytes


def encode(header: Header) -> bytes:
    """`Header.meta.header_bytes` bytes."""
    meta = header.meta
    fixed = _FIXED.pack(
        _MAGIC,
        VERSION,
        meta.header_bytes,
        meta.start,
        meta.num_tokens,
        header.payload_crc,
        header.payload_bytes,
        header.identity,
        meta.key,
        meta.parent,
    )
    body = (fixed + meta.tokens).ljust(meta.header_bytes - _DIGEST_BYTES, b"\0")
    return body + _digest(body)


def header_length(page: bytes | memoryview) -> int | Outcome:
    """How long the header is that begins with this page (or less); FORMAT or CUT where none of ours does."""
    if len(page) < _FIXED.size:
        return Outcome.CUT
    magic, version, length = _FIXED.unpack_from(page)[:3]
    if magic != _MAGIC or version != VERSION or length % PAGE or not PAGE <= length <= MAX_HEADER_BYTES:
        return Outcome.FORMAT
    return int(length)


def decode(raw: bytes | memoryview) -> Header | Outcome:
    """The header in ``raw``, which is exactly as long as `header_length` said, or what is wrong with it."""
    length = header_length(raw)
    if isinstance(length, Outcome):
        return length
    if len(raw) != length:
        return Outcome.CUT
    body = raw[:-_DIGEST_BYTES]
    if _digest(body) != raw[-_DIGEST_BYTES:]:
        return Outcome.CORRUPT
    _, _, _, start, num_tokens, crc, payload_bytes, identity, key, parent = _FIXED.unpack_from(raw)
    tokens = bytes(body[_FIXED.size : _FIXED.size + num_tokens * TOKEN_BYTES])
    if not payload_bytes or not num_tokens or len(tokens) != num_tokens * TOKEN_BYTES:
        return Outcome.FORMAT
    meta = ShardMeta(key, parent, start, tokens)
    return Header(meta, identity, payload_bytes, crc) if meta.header_bytes == length else Outcome.FORMAT


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, person=b"firsttoken/disk").digest()
