"""What is refused, and that it is refused soon."""

from __future__ import annotations

import json
import time

import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.grammar.source import check


def schema(**fields: object) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("json_schema", "{", "JSON schema"),
        ("json_schema", "[]", "object schema"),
        ("json_schema", schema(type="array", uniqueItems=True), "uniqueItems"),
        ("json_schema", schema(**{"not": {}}), '"not"'),
        ("json_schema", schema(**{"if": {}, "then": {}}), '"if"'),
        ("json_schema", schema(type="string", format="weird"), "weird"),
        ("json_schema", schema(type="string", pattern="(?=a)b"), "look-around"),
        ("json_schema", schema(**{"$ref": "http://127.0.0.1:1/x"}), "retrieving"),
        ("json_schema", schema(**{"$ref": "#/x"}), "does not exist"),
        ("json_schema", schema(type="string", minLength=5, maxLength=3), "Unsatisfiable"),
        # What a schema says of itself cannot have keywords ignored.
        ("json_schema", schema(type="array", uniqueItems=True, **{"x-guidance": {"lenient": True}}), "uniqueItems"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "recursion"),
        ("regex", "[", "unclosed"),
        ("regex", "(?=x)", "look-around"),
        ("choice", "[]", "at least one"),
        ("choice", '[""]', "empty"),
        ("choice", "[1]", "list of texts"),
        ("lark", 'root ::= "a"', "GBNF"),
        ("lark", "start: missing", "missing"),
    ],
)
def test_a_refusal_says_what_is_wrong(kind, source, said):
    with pytest.raises(InvalidRequest, match=r"cannot be used") as refused:
        check(Grammar(kind, source))
    assert said in refused.value.message
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a{300}){300}"),
        ("json_schema", schema(type="string", minLength=10**6)),
        ("json_schema", schema(type="array", minItems=10**5)),
        ("json_schema", schema(type="object", properties={"a": {"$ref": "#"}}, required=["a"])),
    ],
)
def test_what_cannot_be_followed_is_refused_within_bounds(answers, kind, source):
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        answers.compiled(Grammar(kind, source))
    assert time.process_time() - began < 5
