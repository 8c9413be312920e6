"""What one answer tells about time: its timeline joined with the engine's part, and its counts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.observability.account import stages, timings
from firsttoken.observability.worst_gap import Gap
from firsttoken.transport.messages import RequestDelta


def _ignore(gap_ns: int) -> None:
    """Where nobody collects gaps."""


@dataclass(slots=True)
class Beside:
    """Work on a request's text, in ns, that was done while its answers went on: it has delayed nothing. ``stop`` is the
    part of ``detokenize`` that went into the search for stop strings, ``write`` all that the consumer did with his
    pieces: as a rule, to write them to a socket."""

    detokenize: int = 0
    stop: int = 0
    write: int = 0


class FirstToken:
    """Of a request with one or more answers: the consumer got it ``after_ns``, from its beginning. ``observe`` is told
    once, in seconds."""

    __slots__ = ("_began_ns", "_observe", "after_ns")

    def __init__(self, began_ns: int, observe: Callable[[float], None]) -> None:
        self.after_ns: int | None = None
        self._began_ns = began_ns
        self._observe = observe

    def note(self, got_ns: int) -> None:
        if self.after_ns is None:
            self.after_ns = got_ns - self._began_ns
            self._observe(self.after_ns / NS_PER_S)


class RequestTimes:
    """Collects from the deltas of one answer. Times are ns of the one clock (`core.clock`). ``first`` is told when the
    consumer got the first token, ``note_gap`` how long after the token before each other one came to this process."""

    __slots__ = (
        "_engine",
        "_first",
        "_found",
        "_got_ns",
        "_note_gap",
        "_sent",
        "_worst_ns",
        "arrived_ns",
        "beside",
        "cached_tokens",
        "preemptions",
        "stop_ns",
        "timeline",
        "token_times",
        "worst",
    )

    def __init__(
        self,
        timeline: Timeline,
        beside: Beside | None = None,
        *,
        first: FirstToken | None = None,
        note_gap: Callable[[int], None] = _ignore,
    ) -> None:
        self.timeline = timeline
        self.beside = beside or Beside()
        self._first = first
        self._note_gap = note_gap
        self.cached_tokens = 0
        self.preemptions = 0
        self.token_times = array("q")  # when the consumer got each token
        self.worst: Gap | None = None  # the largest of its gaps
        self._worst_ns = 0
        self.arrived_ns = self._got_ns = 0  # when the latest tokens came to this process, and to the consumer
        self.stop_ns = 0
        self._sent = timeline.stamps()
        self._engine: list[tuple[int, int]] = []
        self._found: RequestDelta | None = None  # the latest that tells of tiers, waits and steps

    def note(
        self, delta: RequestDelta, arrived_ns: int, came_ns: int, got_ns: int, made_ns: int, passed_ns: int
    ) -> None:
        """Take what ``delta`` says besides its tokens. It reached this process at ``arrived_ns``; the consumer asked
        for it at ``came_ns`` and got it at ``got_ns``. Until ``made_ns`` its text was made, and until ``passed_ns``
        passed on; both are ``got_ns`` where that is not known yet.

        The engine may send its stamps in pieces or at the end, and may repeat those that are known already.
        """
        if delta.stamps:
            self._take_counts(delta)
            self.timeline.extend(self._fresh(delta))
        elif self._found is None or delta.finish_reason is not None:
            self._take_counts(delta)
        count = len(delta.tokens)
        if not count:
            return
        last_ns = self._got_ns
        if last_ns:
            if got_ns - last_ns > self._worst_ns:
                self._worst_ns = got_ns - last_ns
                self.worst = Gap(len(self.token_times), self.arrived_ns, last_ns, arrived_ns, came_ns, got_ns)
            self._note_gap(arrived_ns - self.arrived_ns)
        elif self._first is not None:
            self._first.note(got_ns)
        self._got_ns = got_ns
        self.arrived_ns = arrived_ns
        self.token_times.append(got_ns)
        beside = self.beside
        beside.detokenize += made_ns - got_ns
        beside.write += passed_ns - made_ns
        if count > 1:
            self._note_others(count - 1)

    def note_at_once(self, delta: RequestDelta, arrived_ns: int) -> None:
        """The same of what the consumer got as it came."""
        self.note(delta, arrived_ns, 0, arrived_ns, arrived_ns, arrived_ns)

    def _note_others(self, count: int) -> None:
        """So many more came together with the latest."""
        for _ in range(count):
            self.token_times.append(self._got_ns)
            self._note_gap(0)

    def finish(self, arrived_ns: int, came_ns: int = 0, got_ns: int = 0, stop_ns: int = 0) -> None:
        """The last tokens came as `note` says, and their text is known now; of the time for it ``stop_ns`` went into
        the search for stop strings."""
        timeline = self.timeline
        if timeline.first(Mark.FINISHED) is None:  # ended on this side, by a stop string or the caller
            timeline.stamp(Mark.FINISHED, arrived_ns)
        if came_ns > arrived_ns:
            timeline.stamp(Mark.HELD, arrived_ns)
        timeline.stamp(Mark.DELIVERED, got_ns or arrived_ns)
        timeline.stamp(Mark.DETOKENIZED)
        self.stop_ns = stop_ns

    def complete(self, last: RequestDelta) -> None:
        """It was cut short here, and this is the engine's last word: what was not known of the way there until then."""
        self._take_counts(last)
        timeline = self.timeline
        end = timeline.marks.index(Mark.FINISHED)
        until = timeline.times[end]
        fresh = self._fresh(last)
        late = [(mark, ns) for mark, ns in fresh if mark != Mark.FINISHED and ns <= until]
        if fresh and not late and fresh[0][0] == Mark.ARRIVED:  # it was on its way there all the time
            late = [(Mark.ARRIVED, until)]
        rest = timeline.stamps()[end:]
        del timeline.marks[end:], timeline.times[end:]
        timeline.extend(late + rest)

    @property
    def queue_ns(self) -> Sequence[int]:
        """How long it waited in the queue for each `core.waits.Wait`; () where that is not known."""
        found = self._found
        return found.spent.queue_ns if found is not None and found.spent is not None else ()

    def timings(self, worst_gap: dict[str, Any] | None = None) -> dict[str, Any]:
        """The account of time so far; see `observability.account.timings`."""
        found = self._found
        spent = found.spent if found is not None else None
        beside = self.beside
        return timings(
            self.timeline,
            cached_tokens=self.cached_tokens,
            cached_host=found.cached_host if found is not None else 0,
            cached_disk=found.cached_disk if found is not None else 0,
            miss=found.miss if found is not None else None,
            kept=found.kept if found is not None else None,
            kept_reason=found.kept_reason if found is not None else None,
            preemptions=self.preemptions,
            queue_ns=self.queue_ns,
            prefill_steps=spent.prefill_steps if spent is not None else 0,
            decode_steps=self._decode_steps(),
            stop_ns=self.stop_ns,
            overlapped_ns={
                "detokenize": beside.detokenize - beside.stop,
                "stop": beside.stop,
                "write": beside.write,
            },
            token_times=self.token_times,
            worst_gap=worst_gap,
        )

    def stages(self) -> dict[str, float]:
        """The stages so far and their sum, as in `timings`."""
        return stages(self.timeline, stop_ns=self.stop_ns)

    def _decode_steps(self) -> int:
        """The engine tells it at the end, which does not come when a stop string has ended the answer: then each token
        after the first had a step."""
        found = self._found
        if found is not None and found.spent is not None and found.finish_reason is not None:
            return found.spent.decode_steps
        return max(len(self.token_times) - 1, 0)

    def _take_counts(self, delta: RequestDelta) -> None:
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.preemptions = max(self.preemptions, delta.preemptions)
        # An ended request's times are kept for minutes, and what it was told of its prompt may take megabytes.
        self._found = msgspec.structs.replace(delta, logprobs=None, prompt_logprobs=None, pooled=None)

    def _fresh(self, delta: RequestDelta) -> list[tuple[int, int]]:
        """Those of the engine's stamps that are new."""
        fresh = _behind(_behind(delta.stamps, self._sent), self._engine)
        self._engine += fresh
        return fresh


# What a consumer got: whose it is, and what `RequestTimes.note` takes of it.
Told = tuple[RequestTimes, RequestDelta, int, int, int, int, int]


class Books:
    """Those of all streams of an engine. Nobody waits for them, and somebody does for the next token: so what was told
    is only put on a list, and noted when all of a step's tokens are on their way."""

    __slots__ = ("_told", "add")

    def __init__(self) -> None:
        self._told: list[Told] = []
        self.add = self._told.append

    def settle(self) -> None:
        """Note what was told since the last time."""
        told = self._told[:]
        self._told.clear()
        for times, delta, arrived_ns, came_ns, got_ns, made_ns, passed_ns in told:
            times.note(delta, arrived_ns, came_ns, got_ns, made_ns, passed_ns)


def _behind(stamps: list[tuple[int, int]], known: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What follows ``known`` in ``stamps``, if they begin with it."""
    return stamps[len(known) :] if known and stamps[: len(known)] == known else stamps
