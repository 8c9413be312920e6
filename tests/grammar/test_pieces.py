"""Into how many pieces tokens cut a JSON text, by where they begin."""

from __future__ import annotations

import json

import numpy as np

from firsttoken.core.grammar import Grammar
from firsttoken.grammar.compiled import Compiled
from firsttoken.grammar.pieces import ESCAPED, INSIDE, OUTSIDE, PLACES, Pieces
from firsttoken.grammar.row import GrammarRow
from firsttoken.grammar.tokens import TokenTable
from tests.grammar.conftest import END, VOCAB, WORDS, Spelling

COLONS = VOCAB - 1  # of those that belong to no token


class ColonSpelling(Spelling):
    def token_bytes(self, token: int) -> bytes:
        return b":" * 16 if token == COLONS else super().token_bytes(token)


def walked(token: bytes, place: int) -> tuple[int, bool, bool, int]:
    """Pieces, whether it begins and ends in a run, and the place behind it."""
    pieces, runs = 0, []
    for byte in token:
        alone = byte in b'"{[,:' if place == OUTSIDE else place == INSIDE and byte == ord('"')
        pieces += alone or not (runs and runs[-1])
        runs.append(not alone)
        if place == ESCAPED:
            place = INSIDE
        elif byte == ord('"'):
            place = OUTSIDE if place == INSIDE else INSIDE
        elif byte == ord("\\") and place == INSIDE:
            place = ESCAPED
    return pieces, bool(runs and runs[0]), bool(runs and runs[-1]), place


def test_tokens_are_cut_by_what_begins_something_where_they_stand():
    tokens = [b"", *(word.encode() for word in WORDS), b":" * 16, b'\\"', b'\\\\",', b'a\\"b", "c', b'":["', b"\\"]
    found = Pieces.of(tokens)
    for place in range(PLACES):
        for index, token in enumerate(tokens):
            told = (found.count, found.begins_in_run, found.ends_in_run, found.after)
            assert tuple(one[place, index] for one in told) == walked(token, place), (token, place)
            longer = [bool(mask[index >> 5] >> (index & 31) & 1) for mask in found.longer[place]]
            assert sum(longer) == found.count[place, index]


def test_colons_in_a_string_are_one_piece_of_it():
    """Many vocabularies have such tokens, which few budgets have room for if each colon began something: then no step
    whose string allows them could be launched ahead."""
    grammar = Grammar(
        "json_schema",
        json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    )
    compiled = Compiled(grammar, TokenTable(ColonSpelling(), (END,), VOCAB))
    assert compiled.growth is not None
    row = GrammarRow(compiled, [], compiled.needed + 6 * compiled.growth, 0, ())
    for byte in b'{"a":"':
        assert not row.may_refuse
        assert row.take(byte)
    assert np.unpackbits(row.mask().view(np.uint8), bitorder="little")[COLONS]
    assert not row.may_refuse
    assert row.take(COLONS)
