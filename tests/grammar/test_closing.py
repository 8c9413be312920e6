"""Short ways to the end are found where a walk byte by byte would go in circles."""

from __future__ import annotations

import json
import re

import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.grammar.examples import example
from firsttoken.grammar.source import ends_of

PATTERNS = [
    r"\d", "b", "b$", "foo", "[0-9]{3}-[0-9]{4}", r"\w+@\w+\.com", "^[A-Z][a-z]+ [A-Z]", "^https?://", r"\.jpg$",
    "^[^@]+@[^@]+$", r"^\+?[1-9]\d{1,14}$", r"^v\d+\.\d+\.\d+$", "x.*y.*z", "é", '"', r"\\", "(?i)yes", "^(foo|bar)+$",
    r"(?P<a>x)(?:y|z)", r"[\d-]+x", r"\x41\u0042", "a{3}b{2,}c{0,4}", r"[^\s]", "",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_example_matches(pattern):
    found = example(pattern)
    assert found is not None
    assert re.search(pattern, found)


@pytest.mark.parametrize(
    "pattern", ["(", "a)", "[", "\\", r"\bx", "(?=a)b", "[a&&b]", "(?x) a", "a{99999}", "(" * 3000]
)
def test_what_is_not_understood_has_none(pattern):
    assert example(pattern) is None


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern])
def test_a_text_of_any_pattern_is_found_and_short(answers, pattern):
    """Of one that may begin anywhere none was found: the schema was refused, or wanted hundreds of tokens."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    found = answers.text(answers.compiled(Grammar("json_schema", json.dumps(schema))).shortest)
    assert re.search(pattern, json.loads(found)["a"])
    assert len(found) <= 20


@pytest.mark.parametrize(
    ("source", "most"),
    [(r"(\d+\.){3}\d+", 8), (r".*foo", 3), (r"(.*\n)*END", 3), (r"(\w+\s){5}\.", 12), ("```json\n(.|\n)*\n```", 24)],
)
def test_so_is_one_of_a_regular_expression(answers, source, most):
    assert len(answers.text(answers.compiled(Grammar("regex", source)).shortest)) <= most


def test_formats_that_go_on_for_long_end_soon(answers):
    properties = {
        form: {"type": "string", "format": form} for form in ("date-time", "uuid", "email", "uri", "duration")
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    assert len(answers.compiled(Grammar("json_schema", json.dumps(schema))).shortest) < 190


def test_patterns_are_found_wherever_they_stand():
    schema = {"patternProperties": {"^k": {"items": [{"pattern": "v"}]}}, "pattern": 5, "properties": {"pattern": {}}}
    assert ends_of(Grammar("json_schema", json.dumps(schema))).texts == (b"k", b"v")
    lark = 'start: "x" %json {"pattern": "\\""} /.*foo/\nother[suffix="|"]: /b/'
    ends = ends_of(Grammar("lark", lark))
    assert (ends.suffixes, ends.texts) == ((b"|",), (b'\\"', b"b", b"foo"))


def test_a_refusal_says_which_limit_was_hit(answers):
    schema = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(600)}}
    with pytest.raises(InvalidRequest, match="max is 2000"):
        answers.compiled(Grammar("json_schema", json.dumps({**schema, "additionalProperties": False})))


def test_so_is_one_of_a_grammar_whose_expressions_stand_in_its_middle(answers):
    source = Grammar("lark", 'start: a "x"\na[lazy]: /.*yes/')
    assert answers.text(answers.compiled(source).shortest) == b"yesx"
