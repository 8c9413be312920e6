"""Reading and writing shard files: system calls, checksums, nothing about which file or why.

O_DIRECT (Linux) keeps KV out of the page cache, where it would push out what others need, and costs the host no copy.
It wants page-aligned memory, offsets and lengths. A payload that ends within a page takes its last bytes through a page
of the worker's; where memory is not aligned the file goes through the page cache, which is told to forget it after.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time

import msgspec

from firsttoken.kvcache.disk.buffers import Scratch, is_aligned, skip, spans, split_tail
from firsttoken.kvcache.disk.format import PAGE, Header, ShardMeta, decode, encode, header_length
from firsttoken.kvcache.disk.outcome import Outcome

# Linux has both; elsewhere the page cache and fsync serve.
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_sync_data = getattr(os, "fdatasync", os.fsync)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# A hit is written down as the file's time this often at most: the order of use outlives a restart by it.
_TOUCH_S = 60.0


class ReadResult(msgspec.Struct, frozen=True):
    """``first_byte_s``: until the first page had come, file opened. ``nbytes``: of header and payload."""

    outcome: Outcome
    first_byte_s: float = 0.0
    nbytes: int = 0


def supports_direct(lock_file: Path) -> bool:
    """Whether files beside this one can be opened past the page cache. Some file systems only refuse the first
    transfer: then `EINVAL` comes from there. Raises `OSError` when the file cannot be opened at all."""
    if not _O_DIRECT:
        return False
    try:
        os.close(os.open(lock_file, _READ | _O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def write_file(
    path: str,
    meta: ShardMeta,
    identity: bytes,
    payload: Sequence[memoryview],
    scratch: Scratch,
    *,
    direct: bool,
    sync: bool,
) -> int:
    """Write a new file and close it; the bytes that it has. The header comes last: it needs the payload's checksum, and
    what has none is no shard. Raises `OSError`; what was written until then is the caller's to remove."""
    direct = direct and is_aligned(payload)
    fd = os.open(path, _NEW | (_O_DIRECT if direct else 0), 0o600)
    try:
        payload_bytes = sum(view.nbytes for view in payload)
        crc = _write_payload(fd, meta.header_bytes, payload, scratch, direct)
        page = scratch.header(meta.header_bytes)
        header = Header(meta, identity, payload_bytes, crc)
        page[:] = encode(header)
        _write_all(fd, [page], 0)
        if direct and payload_bytes % PAGE:
            os.ftruncate(fd, header.file_bytes)
        if sync:
            _sync_data(fd)
        if not direct:
            _forget_pages(fd)
        return header.file_bytes
    finally:
        os.close(fd)


def read_file(
    path: str,
    meta: ShardMeta,
    identity: bytes,
    into: Sequence[memoryview],
    scratch: Scratch,
    *,
    direct: bool,
    touch: bool,
) -> ReadResult:
    """Fill ``into`` with the payload of a shard's file if it is the one that is meant, in every respect.

    Raises `OSError`. ``touch``: a hit makes the file young.
    """
    direct = direct and is_aligned(into)
    began = perf_counter()
    fd = os.open(path, _READ | (_O_DIRECT if direct else 0))
    try:
        status = os.fstat(fd)
        page = scratch.header(meta.header_bytes)
        got = os.preadv(fd, [page], 0)
        first_byte_s = perf_counter() - began
        header = _expected(page[:got], meta, identity, sum(view.nbytes for view in into), status.st_size)
        if isinstance(header, Outcome):
            return ReadResult(header, first_byte_s, got)
        crc = _read_payload(fd, meta.header_bytes, into, scratch, direct)
        if isinstance(crc, Outcome):
            return ReadResult(crc, first_byte_s, got)
        if not direct:
            _forget_pages(fd)
        if crc != header.payload_crc:
            return ReadResult(Outcome.CORRUPT, first_byte_s, header.file_bytes)
        # Times of files are by the wall clock.
        if touch and abs(time() - status.st_mtime) > _TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(fd)
        return ReadResult(Outcome.DONE, first_byte_s, header.file_bytes)
    finally:
        os.close(fd)


def read_header(path: str, scratch: Scratch) -> Header | Outcome:
    """The header of a file whose length is as it says, or what is wrong. Raises `OSError`."""
    fd = os.open(path, _READ)
    try:
        page = scratch.header(PAGE)
        length = header_length(page[: os.preadv(fd, [page], 0)])
        if isinstance(length, Outcome):
            return length
        if length > PAGE:
            page = scratch.header(length)
            page = page[: os.preadv(fd, [page], 0)]
        header = decode(page)
        if isinstance(header, Header) and header.file_bytes != os.fstat(fd).st_size:
            return Outcome.CUT
        return header
    finally:
        os.close(fd)


# ------------------------------------------------------------------ inside


def _expected(page: memoryview, meta: ShardMeta, identity: bytes, payload_bytes: int, size: int) -> Header | Outcome:
    """The header in ``page`` if it is that of the very shard, identity and length that are asked for."""
    length = header_length(page)
    if isinstance(length, Outcome):
        return length
    if length != meta.header_bytes:
        # Its other pages were not read, since whatever they say is not what was asked for.
        return Outcome.CUT if length > size else Outcome.TOKENS
    header = decode(page)
    if isinstance(header, Outcome):
        return header
    if header.identity != identity:
        return Outcome.IDENTITY
    if header.meta != meta:
        return Outcome.TOKENS
    if header.payload_bytes != payload_bytes:
        return Outcome.SIZE
    return header if header.file_bytes == size else Outcome.CUT


def _write_payload(fd: int, offset: int, payload: Sequence[memoryview], scratch: Scratch, direct: bool) -> int:
    body, tail = split_tail(payload) if direct else (payload, memoryview(b""))
    crc = 0
    for group in spans(body):
        crc = _checksum(group, crc)
        _write_all(fd, group, offset)
        offset += sum(view.nbytes for view in group)
    if tail:
        crc = zlib.crc32(tail, crc)
        scratch.tail[:] = bytes(tail).ljust(PAGE, b"\0")
        _write_all(fd, [scratch.tail], offset)
    return crc


def _read_payload(fd: int, offset: int, into: Sequence[memoryview], scratch: Scratch, direct: bool) -> int | Outcome:
    """The checksum of what was read, or CUT."""
    body, tail = split_tail(into) if direct else (into, memoryview(b""))
    crc = 0
    for group in spans(body):
        if not _read_all(fd, group, offset):
            return Outcome.CUT
        crc = _checksum(group, crc)
        offset += sum(view.nbytes for view in group)
    if tail:
        if os.preadv(fd, [scratch.tail], offset) < tail.nbytes:
            return Outcome.CUT
        tail[:] = scratch.tail[: tail.nbytes]
        crc = zlib.crc32(tail, crc)
    return crc


def _checksum(group: Sequence[memoryview], crc: int) -> int:
    for view in group:
        crc = zlib.crc32(view, crc)
    return crc


def _write_all(fd: int, group: Sequence[memoryview], offset: int) -> None:
    left = list(group)
    while left:
        written = os.pwritev(fd, left, offset)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        offset += written
        left = skip(left, written)


def _read_all(fd: int, group: Sequence[memoryview], offset: int) -> bool:
    """False when the file ends before."""
    left = list(group)
    while left:
        got = os.preadv(fd, left, offset)
        if not got:
            return False
        offset += got
        left = skip(left, got)
    return True


def _forget_pages(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
