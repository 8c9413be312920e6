"""A file of JSON lines that a thread of its own writes, so that nobody waits for the disk."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from firsttoken.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_RECORDS = 16_384
MAX_BYTES = 64 << 20
"""What may wait for the thread; one more record is dropped and counted."""
_RECORD_BYTES = 1024  # of what is in each record, about
_SAY_EVERY_S = 60.0
_CLOSE_S = 5.0
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def check_writable(path: str) -> None:
    """Raises `ConfigError` for a file that cannot be opened, or made."""
    os.close(_opened(path))


def _opened(path: str | Path) -> int:
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to --audit-log {path}: {error.strerror}; name another file") from None


class AuditFile(Collector):
    """Opened at once, readable by its owner alone. Where its name stands for another file, or for none, as after
    logrotate's move, the next record goes to a new one; `reopen` says so at once. A disk that is full costs the records
    of the time, which are counted, and nothing else. Raises `ConfigError` for a file that cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._waiting: list[tuple[Any, int]] = []
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = self._reopen = False
        self._torn = False  # the last write ended inside a line
        self._written = self._dropped = self._lost = 0
        self._said_s = -_SAY_EVERY_S
        self._unsaid = 0
        self._file = _opened(path)
        self._thread = threading.Thread(target=self._run, name="firsttoken-audit", daemon=True)
        self._thread.start()

    def add(self, record: dict[str, Any], size: int = 0) -> None:
        """Have a record written that holds texts of about ``size`` bytes. It is the file's from now on."""
        with self._changed:
            if len(self._waiting) >= MAX_RECORDS or self._bytes + size > MAX_BYTES or self._closed:
                self._dropped += 1
                return
            self._waiting.append((record, size))
            self._bytes += size + _RECORD_BYTES
            self._changed.notify()

    def reopen(self) -> None:
        """Write to a file of that name that is opened now."""
        with self._changed:
            self._reopen = True
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, for some seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("firsttoken_audit_records", "Records in the audit log", value=self._written)
        lost = CounterMetricFamily("firsttoken_audit_dropped", "Records that are not in the audit log", labels=["why"])
        lost.add_metric(["full_queue"], self._dropped)
        lost.add_metric(["disk"], self._lost)
        yield lost

    # --------------------------------------------------------------- on the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._reopen or self._closed):
                    self._changed.wait()
                batch, self._waiting, self._bytes = self._waiting, [], 0
                reopen, self._reopen, closed = self._reopen, False, self._closed
            self._write(batch, reopen=reopen)
            self._say()
            if closed and not batch:
                os.close(self._file)
                return

    def _write(self, batch: list[tuple[Any, int]], *, reopen: bool) -> None:
        lines = [msgspec.json.encode(record) + b"\n" for record, _ in batch]
        try:
            if reopen or self._moved():
                fresh = os.open(self._path, _FLAGS, 0o600)
                os.close(self._file)
                self._file, self._torn = fresh, False
        except OSError as error:
            log.warning("audit log: %s cannot be opened anew: %s", self._path, error.strerror)
        for number, line in enumerate(lines):
            try:
                self._write_line(line)
            except OSError as error:
                self._lost += len(lines) - number
                log.warning("audit log: %s: %s; what happens meanwhile is not in it", self._path, error.strerror)
                return
            self._written += 1

    def _write_line(self, line: bytes) -> None:
        left = memoryview(b"\n" + line if self._torn else line)
        while left:
            done = os.write(self._file, left)
            self._torn = done < len(left)
            left = left[done:]

    def _moved(self) -> bool:
        ours = os.fstat(self._file)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        return (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino)

    def _say(self) -> None:
        now = time.monotonic()
        if self._dropped == self._unsaid or now - self._said_s < _SAY_EVERY_S:
            return
        log.warning("audit log: %d records were dropped: more came than can be written", self._dropped - self._unsaid)
        self._said_s, self._unsaid = now, self._dropped
