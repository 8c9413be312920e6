"""What a worker does for one `put` or `get`, from the first system call to the outcome.

Nothing is raised for the disk's sake.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import TypeVar

import msgspec

from firsttoken.core.clock import now_ns
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk.buffers import Scratch
from firsttoken.kvcache.disk.files import ReadResult, read_file, write_file
from firsttoken.kvcache.disk.folder import Folder
from firsttoken.kvcache.disk.format import ShardMeta
from firsttoken.kvcache.disk.index import DiskIndex, Stored
from firsttoken.kvcache.disk.outcome import WORTHLESS, Outcome
from firsttoken.kvcache.disk.shelf import Shelf
from firsttoken.kvcache.disk.stats import Counters
from firsttoken.kvcache.eviction.interface import Shard

T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# These say nothing about the file.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


class Transfer(msgspec.Struct, frozen=True):
    """A shard and the caller's buffers for it. ``shard.nbytes`` is of the file."""

    meta: ShardMeta
    shard: Shard
    views: list[memoryview]
    service: ServiceClass


class Transfers:
    """``direct``: past the page cache, until the file system says at a transfer that it cannot."""

    def __init__(
        self,
        folder: Folder,
        shelf: Shelf,
        index: DiskIndex,
        counters: Counters,
        identity: bytes,
        *,
        direct: bool,
        sync: bool,
    ) -> None:
        self.direct = direct
        self._folder = folder
        self._shelf = shelf
        self._index = index
        self._counters = counters
        self._identity = identity
        self._sync = sync
        self._numbers = count()

    def write(self, transfer: Transfer, wanted: Callable[[], bool], scratch: Scratch) -> Outcome:
        """Store a shard while it is ``wanted`` (asked under the lock)."""
        meta, shard = transfer.meta, transfer.shard
        with self._shelf.lock:
            if not wanted():
                return Outcome.DROPPED
        short = self._shelf.reserve(shard.nbytes)
        if short is not None:
            return short
        temporary = self._folder.temporary(shard.key, next(self._numbers))
        began = perf_counter()

        def write(direct: bool) -> int:
            if not direct:
                _remove(temporary)  # what a first try left
            return write_file(temporary, meta, self._identity, transfer.views, scratch, direct=direct, sync=self._sync)

        outcome = Outcome.IO_ERROR
        try:
            self._try(write)
            outcome = self._shelf.publish(temporary, shard, meta.parent, transfer.service, wanted)
        except OSError as error:
            self._shelf.error(error, "writing a shard")
            outcome = Outcome.NO_SPACE if error.errno in _FULL else Outcome.IO_ERROR
        finally:
            if outcome is not Outcome.DONE:
                _remove(temporary)
                self._shelf.settle(shard.nbytes)
        if outcome is Outcome.DONE:
            with self._shelf.lock:
                self._counters.wrote(shard.nbytes, perf_counter() - began)
        return outcome

    def read(self, transfer: Transfer, stored: Stored | None, scratch: Scratch) -> Outcome:
        """Fill the buffers. ``stored`` is what the index has, held until here; None when it does not know yet."""
        began = perf_counter()
        result, useless = ReadResult(Outcome.IO_ERROR), False
        try:
            result, useless = self._read(transfer, scratch)
        finally:
            seconds = perf_counter() - began
            with self._shelf.lock:
                now = now_ns()  # within the lock: a policy's time never goes back
                self._counters.read(result.outcome, result.nbytes, seconds, result.first_byte_s)
                if stored is not None:
                    self._index.release(stored, now)
                    if result.outcome is Outcome.DONE and self._index.get(stored.shard.key) is stored:
                        self._index.use(stored, transfer.service, now)
        if useless and stored is not None:
            self._shelf.forget(stored)
        return result.outcome

    def _read(self, transfer: Transfer, scratch: Scratch) -> tuple[ReadResult, bool]:
        """Also whether the file is of no use to anybody."""
        path = self._folder.file(transfer.shard.key)
        try:
            result = self._try(
                lambda direct: read_file(
                    path,
                    transfer.meta,
                    self._identity,
                    transfer.views,
                    scratch,
                    direct=direct,
                    touch=self._folder.writable,
                )
            )
        except FileNotFoundError:
            return ReadResult(Outcome.ABSENT), True
        except OSError as error:
            self._shelf.error(error, "reading a shard")
            return ReadResult(Outcome.IO_ERROR), error.errno not in _PASSING
        if result.outcome in WORTHLESS:
            self._shelf.complaints.about(result.outcome, f"{path} cannot be used: {result.outcome.value}")
        return result, result.outcome in WORTHLESS

    def _try(self, transfer: Callable[[bool], T]) -> T:
        """With O_DIRECT, and without from the moment on when the file system proves not to have it."""
        if self.direct:
            try:
                return transfer(True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._shelf.error(error, "a transfer with O_DIRECT, which is not used any more,")
                self.direct = False
        return transfer(False)


def _remove(temporary: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
