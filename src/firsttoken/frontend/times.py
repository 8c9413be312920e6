"""What one answer tells about time: its timeline joined with the engine's part, and its counts."""

from __future__ import annotations

from array import array
from typing import Any

from firsttoken.core.timeline import Mark, Timeline
from firsttoken.observability.account import timings
from firsttoken.transport.messages import RequestDelta


class RequestTimes:
    """Collects from the deltas of one answer. Times are ns of the one clock (`core.clock`)."""

    __slots__ = ("_engine", "_found", "_sent", "cached_tokens", "preemptions", "timeline", "token_times")

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.cached_tokens = 0
        self.preemptions = 0
        self.token_times = array("q")  # when each token arrived
        self._sent = timeline.stamps()
        self._engine: list[tuple[int, int]] = []
        self._found: RequestDelta | None = None  # the first, then the last: they tell of tiers

    def note(self, delta: RequestDelta, ns: int) -> None:
        """Take what ``delta``, which arrived at ``ns``, says besides its tokens.

        The engine may send its stamps in pieces or at the end, and may repeat those that are known already.
        """
        if delta.stamps:
            fresh = _behind(_behind(delta.stamps, self._sent), self._engine)
            self._engine += fresh
            self.timeline.extend(fresh)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.preemptions = max(self.preemptions, delta.preemptions)
        if delta.finish_reason is not None or self._found is None:
            self._found = delta
        for _ in delta.tokens:
            self.token_times.append(ns)

    def finish(self, ns: int) -> None:
        """The last tokens arrived at ``ns``, and their text is known now."""
        if self.timeline.first(Mark.FINISHED) is None:  # ended on this side, by a stop string or the caller
            self.timeline.stamp(Mark.FINISHED, ns)
        self.timeline.stamp(Mark.DELIVERED, ns)
        self.timeline.stamp(Mark.DETOKENIZED)

    def timings(self) -> dict[str, Any]:
        """The account of time so far; see `observability.account.timings`."""
        found = self._found
        return timings(
            self.timeline,
            cached_tokens=self.cached_tokens,
            cached_host=found.cached_host if found is not None else 0,
            cached_disk=found.cached_disk if found is not None else 0,
            miss=found.miss if found is not None else None,
            kept=found.kept if found is not None else None,
            kept_reason=found.kept_reason if found is not None else None,
            preemptions=self.preemptions,
            token_times=self.token_times,
        )


def _behind(stamps: list[tuple[int, int]], known: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What follows ``known`` in ``stamps``, if they begin with it."""
    return stamps[len(known) :] if known and stamps[: len(known)] == known else stamps
