"""A request's append-only timeline: every change of state is stamped, and nothing about time is guessed.

A stamp names the *state that begins* with it, so the account of a request is the walk over consecutive stamps:
each instant has exactly one owner and the stages sum to the wall time by construction
(`observability.account` does that walk).
"""

from __future__ import annotations

from enum import IntEnum

from firsttoken.core.clock import now_ns


class Mark(IntEnum):
    """The states of a request, in the order in which it usually passes them."""

    RECEIVED = 1  # first byte of the request read; reading and parsing begin
    PARSED = 2  # body decoded and validated; the chat template begins
    TEMPLATED = 3  # prompt text known; tokenising begins
    TOKENIZED = 4  # prompt tokens known; the way to the engine begins
    ARRIVED = 5  # the engine has it; queueing begins
    SCHEDULED = 6  # admitted to a step; prefill begins
    FIRST_TOKEN = 7  # first token harvested; decode begins
    PREEMPTED = 8  # blocks taken away; queueing begins again
    FINISHED = 9  # last token harvested; the way back begins
    DELIVERED = 10  # last tokens are with who makes text of them; detokenising begins
    DETOKENIZED = 11  # last text known; writing begins
    WRITTEN = 12  # last byte handed to the socket
    RESTORING = 13  # admitted, and its KV comes from a lower tier; SCHEDULED follows
    HELD = 15  # last tokens reached the API process while earlier ones are being passed on; DELIVERED follows
    FAILED = 14  # an error or the caller's leaving ends it; telling the caller begins


class Timeline:
    """Append-only list of ``(mark, ns)``; stamps never go back in time."""

    __slots__ = ("marks", "times")

    def __init__(self, stamps: list[tuple[int, int]] | None = None) -> None:
        self.marks: list[int] = [mark for mark, _ in stamps or ()]
        self.times: list[int] = [ns for _, ns in stamps or ()]

    def stamp(self, mark: Mark, ns: int | None = None) -> int:
        """Record that the state ``mark`` begins at ``ns`` (default: now); returns the time recorded."""
        ns = now_ns() if ns is None else ns
        if self.times and ns < self.times[-1]:
            ns = self.times[-1]
        self.marks.append(int(mark))
        self.times.append(ns)
        return ns

    def first(self, mark: Mark) -> int | None:
        """Time of the first stamp of ``mark``, in ns."""
        try:
            return self.times[self.marks.index(int(mark))]
        except ValueError:
            return None

    def stamps(self) -> list[tuple[int, int]]:
        return list(zip(self.marks, self.times, strict=True))

    def extend(self, stamps: list[tuple[int, int]]) -> None:
        """Append stamps made elsewhere (the engine's part of the way)."""
        for mark, ns in stamps:
            self.stamp(Mark(mark), ns)
