"""What the disk tier did, and how fast."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from time import monotonic

import msgspec

from firsttoken.kvcache.disk.outcome import Outcome

logger = logging.getLogger(__name__)

# Of a rate's weight, what is left after one more transfer: the last twenty or so decide.
_KEEP = 0.95
_QUIET_S = 60.0
_GB = 1e9


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, but for what is there now: ``files`` (shards that can be hit), ``strangers`` (files of
    other models or versions), ``nbytes`` of both, ``kept_bytes`` (by callers' wishes), ``pending_*`` (in hand).

    ``misses`` are of `get` and ``refused`` of `put`, by `Outcome` values; ``errors`` count by its name (ENOSPC, EIO,
    ..) what the system said, wherever. ``damaged`` files were found while looking through the folder. ``read_gb_s`` and
    ``write_gb_s`` are what one transfer got lately beside the others, from opening its file to its last checksum or its
    new name, without its time in the queue; None before the first. ``first_byte_ms`` likewise, until a file's first
    page had come. ``scan_s`` is what looking through the folder took, None while it goes on.
    """

    files: int
    strangers: int
    nbytes: int
    cap_bytes: int
    kept_bytes: int
    read_only: bool
    direct: bool
    scan_s: float | None
    hits: int
    misses: Mapping[str, int]
    stored: int
    already_stored: int
    refused: Mapping[str, int]
    errors: Mapping[str, int]
    evicted: int
    damaged: int
    read_bytes: int
    read_s: float
    written_bytes: int
    write_s: float
    read_gb_s: float | None
    write_gb_s: float | None
    first_byte_ms: float | None
    pending_reads: int
    pending_read_bytes: int
    pending_writes: int
    pending_write_bytes: int


class Recent:
    """A ratio of two sums in which each addition counts a little less with every later one."""

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def add(self, above: float, below: float) -> None:
        self._above = self._above * _KEEP + above
        self._below = self._below * _KEEP + below

    @property
    def ratio(self) -> float | None:
        return self._above / self._below if self._below > 0 else None


class Counters:
    """The running part of `DiskStats`. Under the store's lock."""

    def __init__(self) -> None:
        self.hits = self.stored = self.already_stored = self.evicted = self.damaged = 0
        self.misses: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.read_bytes = self.written_bytes = 0
        self.read_s = self.write_s = 0.0
        self.read_rate, self.write_rate, self.first_byte = Recent(), Recent(), Recent()

    def read(self, outcome: Outcome, nbytes: int, seconds: float, first_byte_s: float) -> None:
        """A `get` ended, having read so much."""
        if outcome is Outcome.DONE:
            self.hits += 1
            self.read_rate.add(nbytes / _GB, seconds)
        else:
            self.misses[outcome.value] += 1
        if nbytes:
            self.first_byte.add(first_byte_s * 1e3, 1.0)
        self.read_bytes += nbytes
        self.read_s += seconds

    def wrote(self, nbytes: int, seconds: float) -> None:
        self.stored += 1
        self.written_bytes += nbytes
        self.write_s += seconds
        self.write_rate.add(nbytes / _GB, seconds)


class Complaints:
    """One line in the log for each kind of trouble, at most once a minute, with how often it came since."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._since: Counter[str] = Counter()
        self._lock = threading.Lock()

    def about(self, kind: str, text: str) -> None:
        with self._lock:
            now = monotonic()
            self._since[kind] += 1
            if kind in self._last and now - self._last[kind] < _QUIET_S:
                return
            self._last[kind] = now
            times = self._since.pop(kind)
        logger.warning("disk tier of the KV cache: %s (%d times since last told)", text, times)
