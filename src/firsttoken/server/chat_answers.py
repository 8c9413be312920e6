"""The pieces of answers in the shapes of chat completions: as chunks of a stream, and as whole messages."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING, Any

from firsttoken.server.conversation import Conversation, Said
from firsttoken.server.encode import (
    ChunkWriter,
    TokenNames,
    chat_choice,
    stop_extra,
    to_json,
    token_ids_extra,
    told_of,
)
from firsttoken.server.kept_logprobs import KeptLogprobs
from firsttoken.text.pieces import CallArguments, CallStart, Content, Piece, Reasoning

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta

ROLE = b'{"role":"assistant","content":""}'
NO_TEXT = b'{"content":""}'
NOTHING = b"{}"


class ChatStream:
    """The chunks of one streaming answer, ``n`` choices side by side. ``token_ids``: each chunk has its own. ``usage``
    tells what was used so far."""

    def __init__(
        self,
        writer: ChunkWriter,
        conversation: Conversation,
        names: TokenNames,
        *,
        token_ids: bool,
        usage: Callable[[], dict[str, Any]],
    ) -> None:
        self._usage = usage
        self._writer = writer
        self._prompt = conversation.prompt
        self._names = names
        self._top = conversation.params.logprobs
        self._token_ids = token_ids
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of each that has begun, around a text
        self._simple = not (token_ids or writer.usage_always or self._top is not None)

    @property
    def text(self) -> Callable[[int, str], bytes | None] | None:
        return self._text if self._simple else None

    def middle(self, said: Said) -> bytes | None:
        """The chunks for what neither begins nor ends an answer; else None."""
        index = said.delta.index
        if said.finish_reason is not None or index not in self._frames:
            return None
        pieces = said.pieces
        if self._simple and len(pieces) == 1 and type(pieces[0]) is Content:
            return self._text(index, pieces[0].text)
        return self.events(said)

    def _text(self, index: int, text: str) -> bytes | None:
        frame = self._frames.get(index)
        if frame is None:
            return None
        return frame[0] + to_json(text) + frame[1] if text else b""

    def events(self, said: Said, timings: dict[str, Any] | None = None) -> bytes:
        """The chunks for ``said``, b"" for none; ``timings`` come with the last answer's end."""
        delta, writer = said.delta, self._writer
        used = self._usage() if writer.usage_always else None
        events = b""
        if delta.index not in self._frames:
            extra = b""
            if self._token_ids and not self._frames:
                extra = b',"prompt_token_ids":' + to_json(self._prompt.tolist())
            self._frames[delta.index] = writer.frame(delta.index)
            events += writer.event(chat_choice(delta.index, ROLE, more=extra), used)
        shown = [_encoded(piece) for piece in said.pieces]
        if not shown and delta.token_ids and (self._token_ids or self._top is not None):
            shown = [NO_TEXT]
        logprobs, more = b"null", b""
        for position, encoded in enumerate(shown):
            if position == 0:  # what is told of the tokens goes with the first of their pieces
                logprobs, more = self._of_tokens(delta)
            events += writer.event(chat_choice(delta.index, encoded, logprobs=logprobs, more=more), used)
            logprobs, more = b"null", b""
        if said.finish_reason is not None:
            finish = to_json(said.finish_reason)
            events += writer.event(chat_choice(delta.index, NOTHING, finish, more=stop_extra(delta)), used, timings)
        return events

    def _of_tokens(self, delta: Delta) -> tuple[bytes, bytes]:
        logprobs, more = b"null", b""
        if self._top is not None:
            logprobs = to_json({"content": list(self._names.chat(told_of(delta), self._top)), "refusal": None})
        if self._token_ids:
            more = token_ids_extra(delta, None)
        return logprobs, more


def _encoded(piece: Piece) -> bytes:
    """A piece as the ``delta`` of a chunk."""
    match piece:
        case Content(text):
            return b'{"content":' + to_json(text) + b"}"
        case Reasoning(text):
            said = to_json(text)
            return b'{"reasoning_content":' + said + b',"reasoning":' + said + b"}"
        case CallStart(index, id_, name):
            function = {"name": name, "arguments": ""}
            return to_json({"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]})
        case CallArguments(index, text):
            return to_json({"tool_calls": [{"index": index, "function": {"arguments": text}}]})


class Message:
    """One choice of a whole answer, gathered as it comes: there may be millions of tokens, so none has an object of its
    own. ``token_ids``: they are told, too."""

    def __init__(self, index: int, conversation: Conversation, names: TokenNames, *, token_ids: bool) -> None:
        self._index = index
        self._names = names
        self._top = conversation.params.logprobs
        self._content = StringIO()
        self._reasoning = StringIO()
        self._calls: list[tuple[CallStart, StringIO]] = []
        self._token_ids = array("i") if token_ids else None
        self._logprobs = None if self._top is None else KeptLogprobs(self._top)
        self._last: Said | None = None

    def add(self, said: Said) -> None:
        for piece in said.pieces:
            match piece:
                case Content(text):
                    self._content.write(text)
                case Reasoning(text):
                    self._reasoning.write(text)
                case CallStart():
                    self._calls.append((piece, StringIO()))
                case CallArguments(index, text):
                    self._calls[index][1].write(text)
        if self._token_ids is not None:
            self._token_ids.extend(said.delta.token_ids)
        if self._logprobs is not None:
            self._logprobs.add(told_of(said.delta))
        if said.finish_reason is not None:
            self._last = said

    def choice(self) -> dict[str, Any]:
        """To be asked for once the answer has ended; for `encode.in_pieces`."""
        assert self._last is not None
        logprobs: dict[str, Any] | None = None
        if self._logprobs is not None:
            logprobs = {"content": self._names.chat(self._logprobs, self._top or 0), "refusal": None}
        choice: dict[str, Any] = {
            "index": self._index,
            "message": self._message(),
            "logprobs": logprobs,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.delta.stop_reason,
        }
        if self._token_ids is not None:
            choice["token_ids"] = iter(self._token_ids)
        return choice

    def _message(self) -> dict[str, Any]:
        content, reasoning = self._content.getvalue(), self._reasoning.getvalue()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": start.id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": arguments.getvalue()},
                }
                for start, arguments in self._calls
            ]
        return message
