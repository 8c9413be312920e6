"""The way from where an answer stands to its end: what is left of one that was known, or else one that is searched.

An answer that leaves its way comes back to it as a rule: what a string or a list was closed with still closes it, and
all that comes after that is as it was. So a known way is tried again from each of its bytes on, now and after what ends
the word that was begun. To check one takes some 0.1 us a byte; to search one takes more than a hundred times as long,
and the step waits for either.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from firsttoken.grammar.closing import END, MAX_CLOSING, ending_byte, find_closing
from firsttoken.grammar.compiled import Compiled

# A way of which tokens are longer than this on average is not looked for.
_TOKEN_BYTES = 16
_SEARCH_S = 0.1
# Places of a known way that are tried, at most; some 10 ms. By number, so that what is found depends on no clock.
_PLACES = 4096
# So many bytes tell most places that do not fit from those that do.
_HEAD = 16
# Bytes by which a word that was begun is ended before a known way is tried again, at most.
_WORD = 16


class Ways:
    """Of one answer, in tokens without the end token. It is told of every token that the answer takes (`follow`)."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._bytes: LLMatcher | None = None
        self._unread = bytearray()  # what `_bytes` has not consumed
        self._known = compiled.shortest
        self._moved = 0  # bytes of the answer since then

    def know(self, way: list[int]) -> None:
        """There is this one from where the answer stands."""
        self._known, self._moved = way, 0

    def follow(self, token: int) -> None:
        spelt = self._compiled.table.bytes[token]
        self._unread += spelt
        self._moved += len(spelt)

    def find(self, most: int, more: bytes = b"") -> list[int] | None:
        """One of at most ``most`` tokens from where the answer will stand when it has gone on with ``more``; None when
        none was found in about a tenth of a second."""
        if self._bytes is None:
            self._bytes = self._compiled.byte_matcher()
        if self._unread:
            self._bytes.consume_tokens(list(self._unread))
            self._unread.clear()
        matcher = self._bytes
        if more:
            matcher = matcher.deep_copy()
            matcher.consume_tokens(list(more))
        if matcher.is_error():
            return None
        way = self._return(matcher, self._moved + len(more), most)
        return self._search(matcher, most) if way is None else way

    def _return(self, matcher: LLMatcher, moved: int, most: int) -> list[int] | None:
        """Back to the known way, by few bytes. None for an answer that has ``moved`` to where it does not go."""
        text = b"".join([self._compiled.table.bytes[token] for token in self._known])
        way = self._rejoin(matcher, text, most, moved)
        if way is not None or not self._compiled.has_json:
            return way
        places = min(len(text), moved + _WORD) + 1
        matcher, word = matcher.deep_copy(), bytearray()
        for _ in range(min(_WORD, _PLACES // places - 1)):
            byte = ending_byte(matcher)
            if byte is None or not matcher.consume_token(byte):
                return None
            word.append(byte)
            way = self._rejoin(matcher, text, most, moved + len(word))
            if way is not None:
                begun = self._compiled.table.spell(bytes(word))
                return None if begun is None or len(begun) + len(way) > most else begun + way
        return None

    def _rejoin(self, matcher: LLMatcher, text: bytes, most: int, moved: int) -> list[int] | None:
        """What is left of the known way, which is ``text``, from some place on, the first that fits; none farther on
        than the answer has ``moved``."""
        for place in range(min(len(text), moved, _PLACES) + 1):
            if _leads_to_end(matcher, text[place:]):
                way = self._from(place)
                if way is not None and len(way) <= most:
                    return way
        return None

    def _from(self, place: int) -> list[int] | None:
        """The known way from its byte ``place`` on; None where the vocabulary cannot spell what is left of a token."""
        table, begun = self._compiled.table, 0
        for index, token in enumerate(self._known):
            if begun >= place:
                return self._known[index:]
            begun += len(table.bytes[token])
            if begun > place:
                part = table.spell(table.bytes[token][place - begun :])
                return None if part is None else part + self._known[index + 1 :]
        return []

    def _search(self, matcher: LLMatcher, most: int) -> list[int] | None:
        made = self._compiled
        closing = find_closing(
            matcher, json=made.has_json, ends=made.ends, most=min(MAX_CLOSING, _TOKEN_BYTES * most), seconds=_SEARCH_S
        )
        way = None if closing is None else made.table.spell(closing)
        return None if way is None or len(way) > most else way


def _leads_to_end(matcher: LLMatcher, text: bytes) -> bool:
    if not text:
        return bool(matcher.is_accepting())
    head = list(text[:_HEAD])
    if matcher.validate_tokens(head) < len(head):
        return False
    return bool(matcher.validate_tokens([*text, END]) == len(text) + 1)


def longest(compiled: Compiled, way: Sequence[int]) -> int:
    """Bytes of the longest token of ``way``."""
    return max((len(compiled.table.bytes[token]) for token in way), default=1)
