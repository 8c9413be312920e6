"""The events of a streamed response, in OpenAI's order. Nearly all are a piece of text between two prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from firsttoken.server.conversation import Said
from firsttoken.server.dialects import OpenAIDialect
from firsttoken.server.encode import TokenNames, Told, in_pieces, to_json, told_of
from firsttoken.server.errors import ApiError
from firsttoken.server.responses.body import failed
from firsttoken.server.responses.output import (
    CallOutput,
    MessageOutput,
    Output,
    OutputItem,
    Probabilities,
    ReasoningOutput,
)
from firsttoken.text.pieces import Content, Piece

_TEXT, _THOUGHT, _ARGUMENTS = "response.output_text", "response.reasoning_text", "response.function_call_arguments"
# Of an event that brings text: what stands before its number, the number, the encoded text.
_DELTA = b'%b%d,"delta":%b}\n\n'


class TokenProbabilities:
    """The log-probabilities of the tokens that the text was made of; nothing where nobody asked (``top`` None).

    Tokens whose text is still held back wait for it; what thoughts and calls are made of is left out.
    """

    def __init__(self, names: TokenNames, top: int | None) -> None:
        self._names = names
        self._top = top
        self._waiting: list[Told] = []

    @property
    def asked(self) -> bool:
        return self._top is not None

    def kept(self) -> Probabilities | None:
        """What a new message keeps those of its tokens in."""
        return None if self._top is None else Probabilities(self._names, self._top)

    def shown(self, told: list[Told]) -> list[dict[str, Any]]:
        return list(self._names.chat(told, self._top or 0))

    def take(self, said: Said) -> list[Told]:
        """Those that go with the next text: of ``said``, and of tokens before it that had none."""
        if self._top is None:
            return []
        self._waiting += told_of(said.delta)
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
        self.output = Output(probabilities.kept)
        self._described = described
        self._probabilities = probabilities
        self._number = 0
        self._head = b""  # of a plain event of the open item

    # ---------------------------------------------------------------------- the stream

    def begin(self) -> bytes:
        """The events before anything is said."""
        response = to_json(self._described)
        events = chain(self._of_response("created", (response,)), self._of_response("in_progress", (response,)))
        return b"".join(events)

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
        number = self._number
        self._number = number + 1
        return _DELTA % (self._head, number, to_json(text))

    def long(self, said: Said) -> bool:
        """Whether the events for ``said`` end an item of which more is told than its text."""
        ends = said.finish_reason is not None or any(type(piece) is not Content for piece in said.pieces)
        return ends and self._probabilities.asked

    def events(self, said: Said) -> Iterator[bytes]:
        """The events for ``said``, in pieces; all of them are to be taken."""
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
            yield from self._more(item, piece, logprobs)
            if type(piece) is Content:
                logprobs = []  # they go with the first text of their tokens
        if said.finish_reason is not None:
            fresh = self.output.open is None
            last = self.output.end(complete=said.finish_reason != "length", logprobs=logprobs)
            if fresh:
                yield from self._opened(last)
            yield from self._closed(last)

    def ended(self, response: Iterable[bytes], finish_reason: str) -> Iterator[bytes]:
        """The last event, with the encoded response, in pieces."""
        return self._of_response("incomplete" if finish_reason == "length" else "completed", response)

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        if self.output.open is not None:
            self.output.end(complete=False, logprobs=[])
        return b"".join(self._of_response("failed", in_pieces(failed(self._described, self.output.shown(), error))))

    # --------------------------------------------------------------------- its events

    def _opened(self, item: OutputItem) -> Iterator[bytes]:
        status, item.status = item.status, "in_progress"
        added = self._event("response.output_item.added", {"output_index": item.index, "item": item.shown()})
        item.status = status
        yield from added
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
        yield from self._event("response.content_part.added", {**place, "part": part})

    def _more(self, item: OutputItem, piece: Piece, logprobs: list[Told]) -> Iterator[bytes]:
        text = getattr(piece, "text", "")
        if not text:
            return
        if isinstance(item, MessageOutput) and item.logprobs is not None:
            self.output.note(logprobs)
            fields = {"item_id": item.id, "output_index": item.index, "content_index": 0, "delta": text}
            yield from self._event(_TEXT + ".delta", {**fields, "logprobs": self._probabilities.shown(logprobs)})
        else:
            yield self._delta(text)

    def _closed(self, item: OutputItem) -> Iterator[bytes]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if isinstance(item, CallOutput):
            fields = {**place, "name": item.start.name, "arguments": item.text}
            yield from self._event(_ARGUMENTS + ".done", fields)
        else:
            assert isinstance(item, MessageOutput | ReasoningOutput)
            place["content_index"] = 0
            part = item.part()
            fields = {**place, "text": part["text"]}
            name = _THOUGHT
            if isinstance(item, MessageOutput):
                name = _TEXT
                fields["logprobs"] = item.part()["logprobs"]
            yield from self._event(name + ".done", fields)
            yield from self._event("response.content_part.done", {**place, "part": part})
        yield from self._event("response.output_item.done", {"output_index": item.index, "item": item.shown()})

    def _delta(self, text: str) -> bytes:
        self._number += 1
        return _DELTA % (self._head, self._number - 1, to_json(text))

    def _event(self, name: str, fields: dict[str, Any]) -> Iterator[bytes]:
        self._number += 1
        body = in_pieces({"type": name, "sequence_number": self._number - 1, **fields})
        return chain((b"event: %b\ndata: " % name.encode(),), body, (b"\n\n",))

    def _of_response(self, status: str, response: Iterable[bytes]) -> Iterator[bytes]:
        self._number += 1
        name = b"response." + status.encode()
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":' % (name, name, self._number - 1)
        return chain((head,), response, (b"}\n\n",))


def _delta_head(name: str, place: dict[str, Any]) -> bytes:
    """What stands before the number of an event that brings text."""
    kind = name + ".delta"
    fixed = to_json({"type": kind, **place})
    return b"event: " + kind.encode() + b"\ndata: " + fixed[:-1] + b',"sequence_number":'
