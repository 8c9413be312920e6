"""The events of a streamed message, in Anthropic's order. Nearly all are a piece of text between two constants."""

from __future__ import annotations

from typing import Any

from firsttoken.server.conversation import Said
from firsttoken.server.encode import to_json
from firsttoken.server.messages.answer import begins, text_of
from firsttoken.text.pieces import CallArguments, CallStart, Content, Piece, Reasoning

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_EMPTY: dict[type[Piece], dict[str, Any]] = {
    Content: {"type": "text", "text": ""},
    Reasoning: {"type": "thinking", "thinking": "", "signature": ""},
}
# The kind of delta that brings a piece, and the field that its text is in.
_DELTAS: dict[type[Piece], tuple[bytes, bytes]] = {
    Content: (b"text_delta", b"text"),
    Reasoning: (b"thinking_delta", b"thinking"),
    CallArguments: (b"input_json_delta", b"partial_json"),
}


class MessageEvents:
    """Writes one message."""

    def __init__(self) -> None:
        self._begun = False
        self._index = -1  # of the open block
        self._first: Piece | None = None  # what began it
        self._text = b""  # what stands before its text, for a block of text

    def begin(self, message: dict[str, Any]) -> bytes:
        """The events before anything is said; ``message`` is as it is then."""
        self._begun = True
        return _event("message_start", {"message": message}) + PING

    def middle(self, said: Said) -> bytes | None:
        """The events for what neither begins nor ends a message; else None."""
        if said.finish_reason is not None or not self._begun:
            return None
        return self.more(said.pieces)

    def text(self, index: int, text: str) -> bytes | None:
        """The event for more of the text of a block of text that is open; else None. A message is one answer."""
        if type(self._first) is not Content:
            return None
        return self._text + to_json(text) + b"}}\n\n" if text else b""

    def more(self, pieces: Any) -> bytes:
        """The events for what was said."""
        found = b""
        for piece in pieces:
            if begins(piece, self._first):
                found += self._close() + self._open(piece)
            if text_of(piece):
                found += self._head(type(piece)) + to_json(text_of(piece)) + b"}}\n\n"
        return found

    def end(self, stop: tuple[str, str | None], usage: dict[str, Any], timings: dict[str, Any] | None) -> bytes:
        """The last events, with the reason for the end and the stop sequence."""
        fields: dict[str, Any] = {"delta": {"stop_reason": stop[0], "stop_sequence": stop[1]}, "usage": usage}
        if timings is not None:
            fields["timings"] = timings
        return self._close() + _event("message_delta", fields) + _event("message_stop", {})

    def _open(self, piece: Piece) -> bytes:
        self._index += 1
        self._first = piece
        if isinstance(piece, CallStart):
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
        else:
            block = _EMPTY[type(piece)]
        self._text = self._head(Content)
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._first is None:
            return b""
        self._first = None
        return _event("content_block_stop", {"index": self._index})

    def _head(self, kind: type[Piece]) -> bytes:
        delta, name = _DELTAS[kind]
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":' % (self._index, delta, name)
        )


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name, **fields}))
