"""The events of a streamed response, in OpenAI's order. Nearly all are a piece of text between two prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from firsttoken.server.conversation import Said
from firsttoken.server.dialects import OpenAIDialect
from firsttoken.server.encode import TokenNames, to_json, told_of
from firsttoken.server.errors import ApiError
from firsttoken.server.responses.body import failed
from firsttoken.server.responses.output import (
    CallOutput,
    Logprobs,
    MessageOutput,
    Output,
    OutputItem,
    ReasoningOutput,
    array_of,
)
from firsttoken.text.pieces import Content, Piece

_TEXT, _THOUGHT, _ARGUMENTS = "response.output_text", "response.reasoning_text", "response.function_call_arguments"


class TokenProbabilities:
    """The log-probabilities of the tokens that the text was made of; nothing where nobody asked (``top`` None).

    Tokens whose text is still held back wait for it; what thoughts and calls are made of is left out.
    """

    def __init__(self, names: TokenNames, top: int | None) -> None:
        self._names = names
        self._top = top
        self._waiting: Logprobs = []

    @property
    def asked(self) -> bool:
        return self._top is not None

    def take(self, said: Said) -> Logprobs:
        """Those that go with the next text: of ``said``, and of tokens before it that had none."""
        if self._top is None:
            return []
        self._waiting += [to_json(one) for one in self._names.chat(told_of(said.delta), self._top)]
        if said.pieces and not any(type(piece) is Content for piece in said.pieces):
            self._waiting = []
        if not said.pieces and said.finish_reason is None:
            return []
        found, self._waiting = self._waiting, []
        return found


class ResponseEvents(OpenAIDialect):
    """Writes one response; once it has begun it is also how an error of it is told. ``described`` is the response at
    its beginning."""

    def __init__(self, described: dict[str, Any], probabilities: TokenProbabilities) -> None:
        self.output = Output(logprobs=probabilities.asked)
        self._described = described
        self._probabilities = probabilities
        self._number = 0
        self._head = b""  # of a plain event of the open item

    # ---------------------------------------------------------------------- the stream

    def begin(self) -> bytes:
        """The events before anything is said."""
        response = to_json(self._described)
        return self._of_response("created", response) + self._of_response("in_progress", response)

    def middle(self, said: Said) -> bytes | None:
        """The events for what neither begins nor ends a response; else None."""
        if said.finish_reason is not None or not self._number:
            return None
        return b"".join(self.events(said))

    @property
    def text(self) -> Callable[[int, str], bytes | None] | None:
        return None if self._probabilities.asked else self._more_text

    def _more_text(self, index: int, text: str) -> bytes | None:
        item = self.output.open
        if type(item) is not MessageOutput:
            return None
        if not text:
            return b""
        item.texts.append(text)
        return self._delta(text)

    def events(self, said: Said) -> Iterator[bytes]:
        """The events for ``said``; all of them are to be taken."""
        logprobs = self._probabilities.take(said)
        for piece in said.pieces:
            before = self.output.open
            closed = self.output.take(piece)
            item = self.output.open
            assert item is not None
            if closed is not None:
                yield from self._closed(closed)
            if item is not before:
                yield from self._opened(item)
            if more := self._more(item, piece, logprobs):
                yield more
            if type(piece) is Content:
                logprobs = []  # they go with the first text of their tokens
        if said.finish_reason is not None:
            fresh = self.output.open is None
            last = self.output.end(complete=said.finish_reason != "length", logprobs=logprobs)
            if fresh:
                yield from self._opened(last)
            yield from self._closed(last)

    def ended(self, response: bytes, finish_reason: str) -> bytes:
        """The last event, with the encoded response."""
        return self._of_response("incomplete" if finish_reason == "length" else "completed", response)

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        if self.output.open is not None:
            self.output.end(complete=False, logprobs=[])
        return self._of_response("failed", to_json(failed(self._described, self.output.shown(), error)))

    # --------------------------------------------------------------------- its events

    def _opened(self, item: OutputItem) -> Iterator[bytes]:
        status, item.status = item.status, "in_progress"
        added = self._event("response.output_item.added", {"output_index": item.index, "item": item.shown()})
        item.status = status
        yield added
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if isinstance(item, CallOutput):
            self._head = _delta_head(_ARGUMENTS, place)
            return
        place["content_index"] = 0
        if isinstance(item, MessageOutput):
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._head = _delta_head(_TEXT, {**place, "logprobs": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            self._head = _delta_head(_THOUGHT, place)
        yield self._event("response.content_part.added", {**place, "part": part})

    def _more(self, item: OutputItem, piece: Piece, logprobs: Logprobs) -> bytes:
        text = getattr(piece, "text", "")
        if not text:
            return b""
        if isinstance(item, MessageOutput) and item.logprobs is not None:
            self.output.note(logprobs)
            fields = {"item_id": item.id, "output_index": item.index, "content_index": 0, "delta": text}
            return self._event(_TEXT + ".delta", {**fields, "logprobs": array_of(logprobs)})
        return self._delta(text)

    def _closed(self, item: OutputItem) -> Iterator[bytes]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if isinstance(item, CallOutput):
            fields = {**place, "name": item.start.name, "arguments": item.text}
            yield self._event(_ARGUMENTS + ".done", fields)
        else:
            assert isinstance(item, MessageOutput | ReasoningOutput)
            place["content_index"] = 0
            part = item.part()
            fields = {**place, "text": part["text"]}
            name = _THOUGHT
            if isinstance(item, MessageOutput):
                name = _TEXT
                fields["logprobs"] = part["logprobs"]
            yield self._event(name + ".done", fields)
            yield self._event("response.content_part.done", {**place, "part": part})
        yield self._event("response.output_item.done", {"output_index": item.index, "item": item.shown()})

    def _delta(self, text: str) -> bytes:
        self._number += 1
        return b'%b%d,"delta":%b}\n\n' % (self._head, self._number - 1, to_json(text))

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        body = to_json({"type": name, "sequence_number": self._number - 1, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)

    def _of_response(self, status: str, response: bytes) -> bytes:
        self._number += 1
        name = b"response." + status.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n' % (
            name,
            name,
            self._number - 1,
            response,
        )


def _delta_head(name: str, place: dict[str, Any]) -> bytes:
    """What stands before the number of an event that brings text."""
    kind = name + ".delta"
    fixed = to_json({"type": kind, **place})
    return b"event: " + kind.encode() + b"\ndata: " + fixed[:-1] + b',"sequence_number":'
