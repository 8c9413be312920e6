"""A model's vocabulary as grammars see it: the bytes of each token, and the tokens that end a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import InvalidRequest
from firsttoken.grammar.closing import byte_tokenizer
from firsttoken.grammar.growth import BEGINNERS

log = logging.getLogger(__name__)


class Spelling(Protocol):
    """What is asked of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def plain_ids(self, text: str) -> list[int]:
        """Of a text in which nothing is a control token, with nothing added."""


class _Vocabulary:
    """What llguidance asks of a tokenizer. ``__call__`` is how it learns which tokens a text that must come now is
    made of by habit."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], special: list[int], end_id: int, spelling: Spelling) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end_id
        self.bos_token_id = None
        self._spelling = spelling

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spelling.plain_ids(text if isinstance(text, str) else text.decode())


@dataclass(frozen=True)
class Pieces:
    """Of each token (arrays [V]): into how many pieces JSON's beginners cut it (`growth`), ``most`` of all, and whether
    its first and its last byte are part of a run. ``longer`` are masks (int32 [most, ceil(V / 32)]) of the tokens of
    more than so many pieces: to look for one among those that a mask allows takes a microsecond."""

    most: int
    count: NDArray[np.int64]
    begins_in_run: NDArray[np.bool_]
    ends_in_run: NDArray[np.bool_]
    longer: NDArray[np.int32]

    @classmethod
    def of(cls, tokens: list[bytes]) -> Pieces:
        lengths = np.array([len(spelt) for spelt in tokens], dtype=np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        flat = np.frombuffer(b"".join(tokens), dtype=np.uint8)
        in_run = ~np.isin(flat, np.frombuffer(BEGINNERS, dtype=np.uint8))
        first = np.zeros(len(flat) + 1, dtype=np.bool_)
        first[starts] = True
        begins = ~in_run | first[:-1]
        begins[1:] |= ~in_run[:-1]
        before = np.concatenate([[0], np.cumsum(begins)])
        some = lengths > 0
        count = before[ends] - before[starts]
        most = int(count.max(initial=0))
        padded = np.zeros(32 * -(-len(count) // 32), dtype=np.int64)
        padded[: len(count)] = count
        longer = [np.packbits(padded > pieces, bitorder="little").view(np.int32) for pieces in range(most)]
        return cls(
            most=most,
            count=count,
            begins_in_run=some & in_run[np.minimum(starts, len(flat) - 1)],
            ends_in_run=some & in_run[np.maximum(ends - 1, 0)],
            longer=np.array(longer, dtype=np.int32),
        )


class TokenTable:
    """Takes about a second to build, and some 30 MB. ``end_ids`` are the model's end tokens; ``vocab_size`` is that of
    its logits, of which the last may belong to no token.

    Raises `InvalidRequest` for a model without an end token: no text that is held to a grammar would end.
    """

    def __init__(self, spelling: Spelling, end_ids: Sequence[int], vocab_size: int) -> None:
        if not end_ids:
            raise InvalidRequest("this model names no end token, so an answer cannot be held to a grammar")
        began_ns = now_ns()
        self.vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self.bytes = [spelling.token_bytes(token) for token in range(vocab_size)]
        special = sorted({*self.end_ids, *(token for token in spelling.special_ids if token < vocab_size)})
        vocabulary = _Vocabulary(self.bytes, special, self.end_ids[0], spelling)
        self.tokenizer = LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=list(self.end_ids))  # type: ignore[arg-type]
        self.byte_tokenizer = byte_tokenizer()
        self.mask_words = -(-vocab_size // 32)
        self.pieces = Pieces.of(self.bytes)
        # The first mask makes tables for all that come after it.
        LLMatcher(self.tokenizer, LLMatcher.grammar_from_json_schema("{}")).compute_bitmask()
        log.info("made ready for grammars in %.0f ms", (now_ns() - began_ns) / NS_PER_MS)

    def spell(self, text: bytes) -> list[int] | None:
        """Tokens of which ``text`` is made, by the longest first; None where the vocabulary cannot spell it."""
        ids = self.tokenizer.tokenize_bytes(text)
        return ids if b"".join([self.bytes[token] for token in ids]) == text else None
