"""The way to the end of an answer that has left the one that was known: back to it, not searched again."""

from __future__ import annotations

import json

import pytest

from firsttoken.core.grammar import Grammar
from firsttoken.grammar import ways as ways_module
from firsttoken.grammar.ways import Ways

FIELDS = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "integer"}},
    "kind": {"enum": ["red", "green"]},
    "more": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
}
DOCUMENT = Grammar("json_schema", json.dumps({"type": "object", "properties": FIELDS, "required": list(FIELDS)}))


@pytest.fixture
def searches(monkeypatch):
    made = []
    search = ways_module.find_closing

    def counting(*args, **named):
        made.append(args)
        return search(*args, **named)

    monkeypatch.setattr(ways_module, "find_closing", counting)
    return made


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "so',
        '{"name":"some\\',
        '{"name":"some words", "ag',
        '{"name":"a","age":-',
        '{"name":"a","age":1234,"tags":[1, 2',
        '{"name":"a","age":1,"tags":[1,2],"kind":"gr',
        '{"name":"a","age":1,"tags":[],"kind":"red","more":{"on":fa',
    ],
)
def test_what_was_begun_is_ended_and_the_known_way_taken_from_there(answers, searches, said):
    ways = Ways(answers.compiled(DOCUMENT))
    for byte in said.encode():
        ways.follow(byte)
    way = ways.find(200)
    assert way is not None
    found = json.loads(said + answers.text(way).decode())
    assert set(found) == set(FIELDS)
    assert not searches


def test_a_way_for_which_there_is_no_room_is_not_taken(answers):
    ways = Ways(answers.compiled(DOCUMENT))
    known = ways.find(200)
    assert known == answers.compiled(DOCUMENT).shortest
    assert ways.find(len(known)) == known
    assert ways.find(len(known) - 1) is None


def test_one_that_does_not_come_back_is_searched(answers, searches):
    grammar = Grammar("choice", '["yes", "no, never"]')
    compiled = answers.compiled(grammar)
    ways = Ways(compiled)
    other = "n" if answers.text(compiled.shortest) == b"yes" else "y"
    way = ways.find(20, other.encode())
    assert way is not None
    assert other + answers.text(way).decode() in ("yes", "no, never")
    assert searches


def test_a_long_answer_with_a_budget_of_twice_its_least_is_hardly_looked_after(answers, searches, monkeypatch):
    """Each look takes the step some tenths of a millisecond, and a search tens of them."""
    looks = []
    find = Ways.find
    monkeypatch.setattr(Ways, "find", lambda self, *args: looks.append(1) or find(self, *args))
    names = [f"field_{index}" for index in range(30)]
    kinds = [{"type": "string"}, {"type": "integer"}, {"enum": ["red", "green"]}]
    properties = {name: kinds[index % 3] for index, name in enumerate(names)}
    grammar = Grammar("json_schema", json.dumps({"type": "object", "properties": properties, "required": names}))
    row = answers.row(grammar, 2 * answers.compiled(grammar).needed)
    said = json.dumps({name: ["words", 12, "green"][index % 3] for index, name in enumerate(names)}).encode()
    late = 0
    for byte in said:
        row.prepare()
        before = len(looks)
        assert not row.may_refuse  # or its step's tokens were read before the next step could be launched
        assert row.take(byte)
        late += len(looks) - before
    assert len(looks) < len(said) / 6
    assert not late  # a mask is made beside, a token is taken while others wait
    assert not searches


def test_a_token_after_which_a_way_must_fit_is_taken_though_none_was_found_in_time(answers, monkeypatch):
    compiled = answers.compiled(DOCUMENT)
    row = answers.row(DOCUMENT, compiled.needed + 4 * compiled.growth)
    monkeypatch.setattr(Ways, "find", lambda self, *args: None)
    said = json.dumps({"name": "Ada"})[:-1].encode()
    taken = 0
    for byte in said:
        if not row.take(byte):
            break
        taken += 1
    # Half of the room is two of its four pieces; no search is asked about these.
    assert taken > len('{"')
