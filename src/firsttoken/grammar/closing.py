"""A short way to the end of a grammar, byte by byte, from where an answer stands.

The search walks a matcher over single bytes and takes at each the one that most likely ends something. No order of
bytes does for all grammars, so a few are tried: JSON's closers first; values that need no closer first; and, first of
all where the grammar is not JSON's, what could not have come a byte earlier, which leaves loops like ``[a-z]+@``. Where
none of that helps, in ``.*foo``, texts that are known to match (`Ends`) are tried as a whole. It need not be the
shortest end there is, which costs room at the end of a budget and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from firsttoken.core.clock import NS_PER_S, now_ns

END = 256
MAX_CLOSING = 8192  # bytes
# An end as short as this is not worth another look.
_SHORT = 24


# What is tried first: most ways are far shorter than they may be, and a walk in circles should end soon.
_FIRST = 256


@dataclass(frozen=True, slots=True)
class Ends:
    """What a grammar says of its ends. ``suffixes``: texts of which one ends a free stretch that no quote ends.
    ``texts``: some that match a regular expression of it, as they are written there."""

    suffixes: tuple[bytes, ...] = ()
    texts: tuple[bytes, ...] = ()


class ByteVocabulary:
    """Every byte a token, and an end token: what llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self) -> None:
        self.tokens = [bytes((byte,)) for byte in range(256)] + [b"<end>"]
        self.special_token_ids = [END]
        self.eos_token_id = END
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(ByteVocabulary(), eos_token=END, slices=[])  # type: ignore[arg-type]


def find_closing(
    matcher: LLMatcher,
    *,
    json: bool,
    ends: Ends = Ends(),
    most: int = MAX_CLOSING,
    seconds: float = 1.0,
    errors: list[str] | None = None,
) -> bytes | None:
    """Bytes after which ``matcher`` (over `byte_tokenizer`, left as it is) accepts; None when no way of at most
    ``most`` bytes was found in about so many ``seconds``. ``json``: the grammar has JSON in it. ``errors`` gets what
    the matcher said where it could not go on."""
    until_ns = now_ns() + round(seconds * NS_PER_S)
    best: bytes | None = None
    for limit in (_FIRST, most) if most > _FIRST else (most,):
        for choose in (_closers_first, _scalars_first, _newest) if json else (_newest, _closers_first):
            if best is not None and (len(best) <= _SHORT or choose is _newest):
                break
            walk = _Walk(matcher.deep_copy(), choose, ends, json)
            found = walk.run(limit if best is None else len(best) - 1, until_ns)
            best = best if found is None else found
            if errors is not None and walk.matcher.is_error():
                errors.append(walk.matcher.get_error())
        if best is not None or now_ns() > until_ns:
            break
    return best


def ending_byte(matcher: LLMatcher) -> int | None:
    """The byte that most likely ends something in JSON where ``matcher`` stands; None where none may come."""
    allowed = _bytes_of(matcher.compute_bitmask())
    return _closers_first(allowed, [], []) if allowed else None


# Of the bytes that may come, how often each came before, and those that might have come a byte earlier: the next one.
Choose = Callable[[list[int], list[int], list[int]], int]


class _Walk:
    def __init__(self, matcher: LLMatcher, choose: Choose, ends: Ends, json: bool) -> None:
        self.matcher = matcher
        self._choose = choose
        self._ends = ends
        self._json = json
        self._used = [0] * 256
        self._free = 0  # bytes for which anything might have come
        self._text = b""  # what is left of one of the ends
        self._before: list[int] = []  # the bytes that might have come last
        self._tried: list[int] = []  # those that might have come when no text did

    def run(self, most: int, until_ns: int) -> bytes | None:
        path = bytearray()
        matcher = self.matcher
        while not matcher.is_accepting():
            # Not by `compute_ff_bytes`, which keeps the interpreter's lock for as long as a forced text is long.
            allowed = _bytes_of(matcher.compute_bitmask())
            if not allowed or len(path) >= most or now_ns() > until_ns:
                return None
            # In a string whose beginning is given, a text has to begin there.
            given = len(allowed) == 1 and not path.endswith(b'"')
            byte = allowed[0] if given else self._next(allowed)
            if self._text:
                byte, self._text = (self._text[0], self._text[1:]) if self._text[0] in allowed else (byte, b"")
            self._used[byte] += 1
            self._before = allowed
            path.append(byte)
            if not matcher.consume_token(byte):
                return None
        return bytes(path)

    def _next(self, allowed: list[int]) -> int:
        suffixes = self._ends.suffixes
        self._free = self._free + 1 if not self._text and _FREE.issubset(allowed) else 0
        if self._free > 1 and suffixes:
            self._text, self._free = suffixes[self._used[_QUOTE] % len(suffixes)], 0
        elif not self._text and self._ends.texts and allowed is not self._tried:
            self._text = self._fitting(allowed)
        return self._choose(allowed, self._used, self._before)

    def _fitting(self, allowed: list[int]) -> bytes:
        """A text that may come now with its end, of a string or of all; outside of JSON without it, too. Else b""."""
        if self._json and _QUOTE in allowed:
            return b""
        for text in self._ends.texts:
            if self._json and self.matcher.validate_tokens([*text, _QUOTE]) > len(text):
                return text + b'"'
            if self.matcher.validate_tokens([*text, END]) > len(text):
                return text
        self._tried = allowed
        if self._json:
            return b""
        return next((one for one in self._ends.texts if self.matcher.validate_tokens(list(one)) == len(one)), b"")


@lru_cache(maxsize=1024)
def _bytes_of(mask: bytes) -> list[int]:
    """The bytes that a mask of the byte vocabulary allows."""
    bits = int.from_bytes(mask, "little") & ((1 << 256) - 1)
    return [byte for byte in range(256) if bits >> byte & 1]


def _order(first: str) -> list[int]:
    """Of each byte its rank: those of ``first``, then printable ones, blanks last of ASCII, then the rest."""
    order = first.encode() + bytes(range(33, 127)) + bytes(range(128, 256)) + b" " + bytes(range(32)) + b"\x7f"
    ranks = [0] * 256
    for rank, byte in reversed(list(enumerate(order))):
        ranks[byte] = rank
    return ranks


_CLOSERS = _order('}]"0123456789ntf,:[{')
_SCALARS = _order('}]0123456789ntf"{[,:')
_QUOTE = ord('"')
# Where all of these may come, it is the text of a string.
_FREE = frozenset(b'"q#')


def _closers_first(allowed: list[int], used: list[int], before: list[int]) -> int:
    return _QUOTE if _FREE.issubset(allowed) else min(allowed, key=_CLOSERS.__getitem__)


def _scalars_first(allowed: list[int], used: list[int], before: list[int]) -> int:
    return _QUOTE if _FREE.issubset(allowed) else min(allowed, key=_SCALARS.__getitem__)


def _newest(allowed: list[int], used: list[int], before: list[int]) -> int:
    """What goes on where it stood is a loop, as a rule, and what leaves it may come behind its first round alone."""
    new = set(allowed).difference(before) or allowed
    return min(new, key=lambda byte: (used[byte], _SCALARS[byte]))
