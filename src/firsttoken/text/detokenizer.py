"""From tokens to text, one piece at a time, never showing half a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Whatever way the ids are split over calls, the pieces joined are the text of the whole."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now complete. A character whose bytes have not all arrived is held back."""

    def finish(self) -> str:
        """What was held back; a character that was cut off becomes U+FFFD. The detokenizer is then spent."""


class ByteDetokenizer:
    """For vocabularies in which every token is a fixed string of bytes (byte-level and SentencePiece BPE).

    ``table`` maps an id to its bytes. Ill-formed UTF-8 becomes U+FFFD by the maximal-subpart rule (Unicode 15,
    section 3.9), the same for any split. ``strip_start`` drops one leading space of the whole text. ``texts`` is filled
    with those of tokens that are whole characters, as nearly all are: it may be shared by all who have the same table.
    """

    __slots__ = ("_alone", "_pending", "_strip_start", "_table", "_texts")

    def __init__(
        self, table: Mapping[int, bytes], texts: dict[int, str] | None = None, *, strip_start: bool = False
    ) -> None:
        self._table = table
        self._texts: dict[int, str] = {} if texts is None else texts
        self._pending = b""  # the first bytes of a character that is not whole yet: at most three
        self._strip_start = strip_start
        self._alone = not strip_start  # the next token's text depends on no other's

    def push(self, ids: Sequence[int]) -> str:
        alone = self._alone and len(ids) == 1
        if alone:
            text = self._texts.get(ids[0])
            if text is not None:
                return text
        raw = b"".join(map(self._table.__getitem__, ids))
        if self._strip_start and raw:
            self._strip_start = False
            raw = raw.removeprefix(b" ")
        raw = self._pending + raw
        text, used = utf_8_decode(raw, "replace", False)
        self._pending = raw[used:]
        self._alone = not (self._pending or self._strip_start)
        if alone and raw and self._alone:  # an id that stands for nothing may be any number
            self._texts[ids[0]] = text
        return text

    def finish(self) -> str:
        return self._pending.decode("utf-8", "replace")


class WindowDetokenizer:
    """For any other decoder: decodes a short window twice and emits the difference.

    The window starts at the last point where the text was complete, so that a decoder that looks at neighbours (word
    joining, clean-up) sees them. ``decode`` maps ids to text.
    """

    __slots__ = ("_decode", "_ids", "_read", "_shown")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0  # ids[:read] have been emitted; they stay in the window as context
        self._shown = ""  # text of ids[:read]

    def push(self, ids: Sequence[int]) -> str:
        # One id at a time: what is emitted then cannot depend on how the ids were split over calls.
        return "".join([self._push_one(token) for token in ids])

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._shown) :]
