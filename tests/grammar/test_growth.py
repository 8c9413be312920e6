"""What is told of a schema beforehand, so that the way to its end need not be looked for after each token."""

from __future__ import annotations

import json

import pytest

from firsttoken.core.grammar import Grammar
from firsttoken.grammar.growth import growth_of


def growth(schema):
    return growth_of(Grammar("json_schema", json.dumps(schema)))


def test_a_piece_of_a_document_is_bounded_by_its_fields_and_not_by_the_whole():
    properties = {f"field_{index}": {"type": "string"} for index in range(50)}
    flat = {"type": "object", "properties": properties, "required": list(properties)}
    whole = growth({"anyOf": [flat, {"type": "null"}]})  # the whole may be begun, or not
    assert whole > 500 > 60 > growth(flat)
    assert growth({"type": "array", "items": flat}) > 500


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"pattern": "a+"}}},
        {"$defs": {"n": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/n"}}]}}, "$ref": "#/$defs/n"},
        {"anyOf": [{"allOf": [{}]}]},
    ],
)
def test_what_cannot_be_told_is_not_guessed(schema):
    assert growth(schema) is None
