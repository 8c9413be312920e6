"""A grammar over a model's tokens: made once, then copied for each answer."""

from __future__ import annotations

from llguidance import LLMatcher

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.grammar.closing import MAX_CLOSING, find_closing
from firsttoken.grammar.growth import growth_of
from firsttoken.grammar.memory import Allocated
from firsttoken.grammar.source import LIMITS, ends_of, has_json, refuse, to_llguidance
from firsttoken.grammar.tokens import TokenTable


class Compiled:
    """``shortest`` are the tokens of a short text that fits, without its end token; ``growth`` is how many
    bytes farther from its end each piece of a token may lead (`growth`), None where that cannot be told; ``nbytes`` is
    what it takes, about (`memory`).

    Raises `InvalidRequest` for a grammar that cannot be used, and one of which no short text was found.
    """

    def __init__(self, grammar: Grammar, table: TokenTable) -> None:
        allocated = Allocated()
        source = to_llguidance(grammar)
        self.table = table
        self._tokens = LLMatcher(table.tokenizer, source, log_level=0, limits=LIMITS)
        self._bytes = LLMatcher(table.byte_tokenizer, source, log_level=0, limits=LIMITS)
        for matcher in (self._tokens, self._bytes):
            if matcher.is_error():
                raise refuse(grammar, matcher.get_error())
        self.has_json, self.ends = has_json(grammar), ends_of(grammar)
        errors: list[str] = []
        closing = find_closing(self._bytes, json=self.has_json, ends=self.ends, errors=errors)
        shortest = None if closing is None else table.spell(closing)
        if shortest is None:
            raise refuse(
                grammar, (*errors, f"no text of at most {MAX_CLOSING} bytes that fits it was found in time")[0]
            )
        self.shortest = shortest
        self.growth = growth_of(grammar)
        self.nbytes = allocated.taken()

    @property
    def needed(self) -> int:
        """Tokens that an answer must have room for, its end token with them."""
        return len(self.shortest) + 1

    def token_matcher(self) -> LLMatcher:
        return self._tokens.deep_copy()

    def byte_matcher(self) -> LLMatcher:
        return self._bytes.deep_copy()

    def check_room(self, max_tokens: int) -> None:
        """Raises `InvalidRequest` naming the least that would do."""
        if max_tokens < self.needed:
            raise InvalidRequest(
                f"max_tokens leaves room for {max_tokens} tokens, and the shortest text found that fits the grammar "
                f"takes {self.needed}: allow at least {self.needed}",
                param="max_tokens",
                code="grammar_needs_more_tokens",
            )
