"""The byte tokenizer's vocabulary with a few longer tokens, and answers drawn at random from masks."""

from __future__ import annotations

import numpy as np
import pytest

from firsttoken.core.grammar import Grammar
from firsttoken.grammar.compiled import Compiled
from firsttoken.grammar.row import GrammarRow
from firsttoken.grammar.tokens import TokenTable
from firsttoken.sampling.constraint import MOST_REFUSALS

END, OTHER_END, SPECIAL = 256, 257, 258
# Tokens that close, open and join several parts of JSON at once, as real vocabularies have them.
WORDS = ['{"', '":', '": "', '","', '", "', '"}', '"]', "}}", "[[", "[{", '":{"', "true", "false", "null", "hello"]
WORDS += [" the", "123", "0.", "ab", "é", "\u65e5", "\\u00", "<|x|>"]
VOCAB = 259 + len(WORDS) + 5  # the last five belong to no token


class Spelling:
    special_ids = frozenset({SPECIAL})

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes((token,))
        if token < 259:
            return (b"<end>", b"<stop>", b"<special>")[token - 256]
        return WORDS[token - 259].encode() if token - 259 < len(WORDS) else b""

    def plain_ids(self, text: str) -> list[int]:
        return list(text.encode())


class Answers:
    def __init__(self) -> None:
        self.table = TokenTable(Spelling(), (END, OTHER_END), VOCAB)
        self._compiled: dict[Grammar, Compiled] = {}

    def compiled(self, grammar: Grammar) -> Compiled:
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = Compiled(grammar, self.table)
        return found

    def row(self, grammar: Grammar, max_tokens: int, output=(), min_tokens=0, stop_ids=()) -> GrammarRow:
        return GrammarRow(self.compiled(grammar), output, max_tokens, min_tokens, stop_ids)

    def next_ids(self, row: GrammarRow) -> list[int]:
        bits = np.unpackbits(row.mask().view(np.uint8), count=VOCAB, bitorder="little")
        return np.flatnonzero(bits).tolist()

    def draw(self, row: GrammarRow, choose, most: int) -> tuple[bytes, list[int]]:
        """An answer of which each token is ``choose``\\ n among the allowed ones, as a sampler does it. It must end
        by itself within ``most`` tokens."""
        output: list[int] = []
        while not output or output[-1] not in (END, OTHER_END):
            assert len(output) < most, f"no end within {most} tokens: {self.text(output)!r}"
            ids = self.next_ids(row)
            careful = row.may_refuse
            for _ in range(1 + MOST_REFUSALS):
                token = choose(ids)
                if row.take(token):
                    break
                assert careful, "a token was refused by a row that had said it would not"
                ids.remove(token)
                if not ids:
                    token = row.take_way_out()
                    break
            else:
                token = row.take_way_out()
            output.append(token)
        return self.text(output), output

    def text(self, output: list[int]) -> bytes:
        return b"".join(self.table.bytes[token] for token in output if token not in (END, OTHER_END))


@pytest.fixture(scope="session")
def answers():
    return Answers()
