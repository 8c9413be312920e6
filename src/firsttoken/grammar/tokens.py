"""A model's vocabulary as grammars see it: the bytes of each token, and the tokens that end a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import InvalidRequest
from firsttoken.grammar.closing import byte_tokenizer
from firsttoken.grammar.pieces import Pieces

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
