"""What a streamed answer says: how many tokens came when, how it ended, what went wrong.

Tokens are counted, not chunks. Servers differ in what they tell, so the best that an answer has is taken
(`CountedBy`): the usage so far on each chunk, the token ids of each chunk, the usage at the end spread over the chunks
by their characters, and where a server tells none of these, chunks with text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from firsttoken.bench.http.events import Event, EventStream, EventTooLong

CountedBy = Literal["usage of each chunk", "token ids", "usage at the end, by characters", "chunks"]
# Reasons that an answer is whole; any other one (abort, error, content_filter) says that it is not.
WHOLE = frozenset({"stop", "length", "tool_calls", "function_call"})
_LONGEST_REASON = 100


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")

    def characters(self) -> int:
        calls = bytes(self.tool_calls)
        spoken = len(self.content or "") + len(self.reasoning_content or self.reasoning or "")
        return spoken + (0 if calls in (b"null", b"[]") else len(calls))


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def characters(self) -> int:
        return self.delta.characters() if self.delta is not None else len(self.text or "")


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Delivery(msgspec.Struct):
    """One chunk: when it came, its characters, its ids, and the usage so far if it told that."""

    at_ns: int
    characters: int
    ids: int
    so_far: int | None


_CHUNK = msgspec.json.Decoder(_Chunk)


class StreamedAnswer:
    """Reads one answer. ``deliveries`` is complete when the answer is; see `arrivals`."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.error: str | None = None
        self.done = False  # the end mark came
        self._events = EventStream()
        self._deliveries: list[_Delivery] = []
        self._total: int | None = None

    @property
    def complete(self) -> bool:
        """Everything that a caller waits for came, whether or not the transfer ended properly after that."""
        return self.done and self.finish_reason is not None

    def feed(self, at_ns: int, piece: bytes) -> None:
        """``piece`` of the body came at ``at_ns``. What is wrong with it is kept in ``error``, the first fault only."""
        if self.error is not None:
            return
        try:
            for event in self._events.feed(piece):
                self._take(at_ns, event)
        except EventTooLong:
            self.error = "an event without an end"

    def arrivals(self) -> tuple[list[tuple[int, int]], CountedBy]:
        """(instant, number of tokens) of each delivery that brought tokens, and how they were counted."""
        found = self._deliveries
        total = self._total
        told = [one.so_far for one in found if one.characters]
        if all(told) and any(one.so_far for one in found):  # on each, not on the last one only
            counts, before = [], 0
            for one in found:
                now = before if one.so_far is None else max(one.so_far, before)
                counts.append(now - before)
                before = now
            if total is None or before == total:
                return _those(found, counts), "usage of each chunk"
        ids = [one.ids for one in found]
        if any(ids) and (total is None or sum(ids) == total):
            return _those(found, ids), "token ids"
        if total is not None:
            weights = [one.characters for one in found]
            counts = spread(total, weights if any(weights) else [1] * len(weights))
            return _those(found, counts), "usage at the end, by characters"
        return _those(found, [int(one.characters > 0) for one in found]), "chunks"

    def _take(self, at_ns: int, event: Event) -> None:
        if event.data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _CHUNK.decode(event.data)
        except msgspec.ValidationError:
            self.error = self.error or f"an event of an unknown shape: {event.data[:40].decode(errors='replace')}"
            return
        except msgspec.DecodeError:
            self.error = self.error or "an event that is not JSON"
            return
        if chunk.error is not None or event.name == b"error":
            self.error = self.error or f"in-band error: {error_words(chunk.error)}"
            return
        self._note(at_ns, chunk)

    def _note(self, at_ns: int, chunk: _Chunk) -> None:
        usage = chunk.usage
        so_far = None
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens or self.prompt_tokens
            if chunk.choices:
                so_far = usage.completion_tokens
                if chunk.choices[0].finish_reason is not None:
                    self._total = so_far
            else:
                self._total = usage.completion_tokens
        for choice in chunk.choices or ():
            ids = len(choice.token_ids) if choice.token_ids is not None else 0
            self._deliveries.append(_Delivery(at_ns, choice.characters(), ids, so_far))
            self.finish_reason = choice.finish_reason or self.finish_reason


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` whole tokens over places by their weights, each place with any weight getting its first token before
    another gets a second, as far as there are tokens."""
    counts = [0] * len(weights)
    places = [place for place, weight in enumerate(weights) if weight > 0][:total]
    for place in places:
        counts[place] = 1
    left, weight_left = total - len(places), sum(weights[place] for place in places)
    for place in places:
        share = round(left * weights[place] / weight_left)
        counts[place] += share
        left -= share
        weight_left -= weights[place]
    return counts


def error_words(error: Any) -> str:
    """A short name of an error object, the same for errors of one kind: its code or type, else its message."""
    if isinstance(error, dict):
        for key in ("code", "type", "message"):
            if error.get(key):
                return str(error[key])[:_LONGEST_REASON]
    return str(error or "no words")[:_LONGEST_REASON]


def _those(found: Sequence[_Delivery], counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(one.at_ns, count) for one, count in zip(found, counts, strict=True) if count > 0]
