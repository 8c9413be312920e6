"""A short way to the end of a grammar, byte by byte, from where an answer stands.

The search walks a matcher over single bytes and takes at each the one that most likely ends something. No order of
bytes does for all grammars, so a few are tried: JSON's closers first; values that need no closer first; and, first of
all where the grammar is not JSON's, whatever was taken least so far, which leaves loops like ``(ab|c)*d``. It need not
be the shortest end there is, which costs room at the end of a budget and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from firsttoken.core.clock import NS_PER_S, now_ns

END = 256
MAX_CLOSING = 8192  # bytes
# An end as short as this is not worth another look.
_SHORT = 24


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
    ends: Sequence[bytes] = (),
    most: int = MAX_CLOSING,
    seconds: float = 1.0,
) -> bytes | None:
    """Bytes after which ``matcher`` (over `byte_tokenizer`, left as it is) accepts; None when no way of at most
    ``most`` bytes was found in about so many ``seconds``. ``json``: the grammar has JSON in it. ``ends`` are texts of
    which one ends a free stretch that no quote ends."""
    until_ns = now_ns() + round(seconds * NS_PER_S)
    best: bytes | None = None
    for choose in (_closers_first, _scalars_first, _least_used) if json else (_least_used, _closers_first):
        if best is not None and (len(best) <= _SHORT or choose is _least_used):
            break
        found = _walk(matcher.deep_copy(), choose, ends, most if best is None else len(best) - 1, until_ns)
        best = best if found is None else found
    return best


Choose = Callable[[list[int], list[int]], int]


def _walk(matcher: LLMatcher, choose: Choose, ends: Sequence[bytes], most: int, until_ns: int) -> bytes | None:
    path = bytearray()
    used = [0] * 256
    free = 0  # bytes for which anything might have come
    end = b""  # what is left of one of the ends
    while not matcher.is_accepting():
        # Not by `compute_ff_bytes`, which keeps the interpreter's lock for as long as a forced text is long.
        allowed = _bytes_of(matcher.compute_bitmask())
        if not allowed or len(path) >= most or now_ns() > until_ns:
            return None
        free = free + 1 if not end and _FREE.issubset(allowed) else 0
        if free > 1 and ends:
            end, free = ends[used[_QUOTE] % len(ends)], 0
        byte = allowed[0] if len(allowed) == 1 else choose(allowed, used)
        if end:
            byte, end = (end[0], end[1:]) if end[0] in allowed else (byte, b"")
        used[byte] += 1
        path.append(byte)
        if not matcher.consume_token(byte):
            return None
    return bytes(path)


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


def _closers_first(allowed: list[int], used: list[int]) -> int:
    return _QUOTE if _FREE.issubset(allowed) else min(allowed, key=_CLOSERS.__getitem__)


def _scalars_first(allowed: list[int], used: list[int]) -> int:
    return _QUOTE if _FREE.issubset(allowed) else min(allowed, key=_SCALARS.__getitem__)


def _least_used(allowed: list[int], used: list[int]) -> int:
    return min(allowed, key=lambda byte: (used[byte], _SCALARS[byte]))
