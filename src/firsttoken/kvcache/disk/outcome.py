"""How a read or a write of the disk tier ended, and the handle that tells it."""

from __future__ import annotations

import threading
from enum import StrEnum


class Outcome(StrEnum):
    """Of a `get` or a `put`: done, or why not. Values are the labels of the counters.

    A `get` may end with done, absent, queue_full, io_error, closed, or what was wrong with the file: *format* (not one
    of ours, or of another version), *cut* (shorter or longer than its header says), *corrupt* (a checksum differs),
    *identity* (another model, KV format or adapter), *tokens* (another key, parent, position or other tokens), *size*
    (the payload is not as long as the buffer). A `put` may end with done, queue_full, read_only, too_large, no_space,
    dropped, io_error or closed.
    """

    DONE = "done"
    ABSENT = "absent"
    FORMAT = "format"
    CUT = "cut"
    CORRUPT = "corrupt"
    IDENTITY = "identity"
    TOKENS = "tokens"
    SIZE = "size"
    QUEUE_FULL = "queue_full"
    READ_ONLY = "read_only"
    TOO_LARGE = "too_large"
    NO_SPACE = "no_space"
    DROPPED = "dropped"
    IO_ERROR = "io_error"
    CLOSED = "closed"


WORTHLESS = frozenset({Outcome.FORMAT, Outcome.CUT, Outcome.CORRUPT, Outcome.IDENTITY, Outcome.TOKENS, Outcome.SIZE})
"""Outcomes after which a file is of no use to anybody who asks for its key."""


class DiskHandle:
    """One submitted read or write.

    Until it is done the caller leaves the buffer alone: the contents of a `put` must not change, and those of a `get`
    mean nothing. After any outcome but done they still mean nothing.
    """

    __slots__ = ("_event", "_outcome")

    def __init__(self, outcome: Outcome | None = None) -> None:
        self._outcome = outcome
        self._event = threading.Event()
        if outcome is not None:
            self._event.set()

    @property
    def outcome(self) -> Outcome | None:
        """None while it runs."""
        return self._outcome

    @property
    def ok(self) -> bool:
        """True once the buffer is filled (`get`) or its content is stored (`put`)."""
        return self._outcome is Outcome.DONE

    def done(self) -> bool:
        """Never blocks."""
        return self._outcome is not None

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Block until it is done; None when that takes longer than the timeout."""
        self._event.wait(timeout_s)
        return self._outcome

    def resolve(self, outcome: Outcome) -> None:
        """For the store: the first call settles it."""
        if self._outcome is None:
            self._outcome = outcome
            self._event.set()
