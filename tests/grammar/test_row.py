"""Answers that are held to grammars: whatever is chosen, they fit, and they end within their budget."""

from __future__ import annotations

import json
import random
import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from firsttoken.core.errors import ConstraintFailed, InvalidRequest
from firsttoken.core.grammar import Grammar
from tests.grammar.conftest import END, OTHER_END, SPECIAL

NAMES = st.sampled_from(["a", "bb", "name", 'q"uote', "é", "a rather long key"])


def leaves():
    bounds = st.tuples(st.integers(-50, 2000), st.integers(0, 500))
    return st.one_of(
        st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"}]),
        st.sampled_from([{"type": "string", "minLength": 3}, {"type": "string", "maxLength": 4}]),
        st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,5}x?$"}, {"type": "string", "format": "date"}]),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        st.lists(
            st.sampled_from(["red", "green", 'a "b"', 12, None, True]), min_size=1, max_size=4, unique_by=repr
        ).map(lambda values: {"enum": values}),
        st.just({}),
    )


@st.composite
def objects(draw, inner):
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": draw(st.sampled_from([False, True, {"type": "boolean"}])),
    }


def schemas():
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            objects(inner),
            st.tuples(inner, st.integers(0, 2)).map(
                lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": pair[1] + 2}
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        ),
        max_leaves=6,
    )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(schemas(), st.randoms(use_true_random=False), st.integers(0, 60), st.booleans())
def test_any_choices_within_any_budget_that_suffices_give_a_valid_document(answers, schema, rng, slack, long):
    grammar = Grammar("json_schema", json.dumps(schema))
    try:
        compiled = answers.compiled(grammar)
    except InvalidRequest:
        assume(False)
    budget = compiled.needed + slack
    # Long tokens open and close several parts at once.
    choose = (lambda ids: rng.choice([i for i in ids if i > 256] or ids)) if long else rng.choice
    text, output = answers.draw(answers.row(grammar, budget), choose, budget)
    document = json.loads(text)
    jsonschema_rs.validator_for(schema).validate(document)
    assert output[-1] in (END, OTHER_END)
    with pytest.raises(InvalidRequest, match=f"at least {compiled.needed}"):
        compiled.check_room(compiled.needed - 1)


@pytest.mark.parametrize("slack", [0, 1, 3, 12, 60])
@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "(ab|c)*d", "(ab|c)*d"),
        ("regex", "[0-9]{3}-[a-z]+(x|y.{20})?", "[0-9]{3}-[a-z]+(x|y.{20})?"),
        ("choice", '["yes", "no", "a/b|c (d) [e] é & ~"]', r"yes|no|a/b\|c \(d\) \[e\] é & ~"),
        ("lark", 'start: "a" e\ne: /[0-9]/ | "(" e "+" e ")"', r"a[0-9()+]+"),
    ],
)
def test_other_grammars_end_within_their_budget_too(answers, kind, source, pattern, slack):
    grammar = Grammar(kind, source)
    budget = answers.compiled(grammar).needed + slack
    for seed in range(3):
        text, _ = answers.draw(answers.row(grammar, budget), random.Random(seed).choice, budget)
        assert re.fullmatch(pattern, text.decode(), re.DOTALL)


def test_what_never_ends_by_itself_is_brought_to_its_end(answers):
    """Whoever always opens another list, or writes blanks where he can, ends all the same."""
    grammar = Grammar("json_object")
    for wanted in (b"[", b" ", b"\n", b"{", b'"'):
        text, _ = answers.draw(answers.row(grammar, 50), _preferring(wanted[0]), 50)
        json.loads(text)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text, _ = answers.draw(answers.row(Grammar("json_schema", json.dumps(schema)), 60), _preferring(ord(" ")), 60)
    assert b"  " not in text


def _preferring(token):
    return lambda ids: token if token in ids else ids[0]


def test_control_tokens_and_ids_without_a_token_are_never_allowed(answers):
    row = answers.row(Grammar("regex", "(?s:.*)"), 40)
    ids = answers.next_ids(row)
    assert SPECIAL not in ids
    assert max(ids) < 259 + 23
    assert {END, OTHER_END, ord("x")} <= set(ids)


def test_an_end_that_is_not_wanted_yet_comes_where_nothing_else_may(answers):
    """``min_tokens``, and ``ignore_eos``, which forbids the end for as long as the answer may go on."""
    row = answers.row(Grammar("regex", "a{1,3}"), 10, min_tokens=10)
    text, output = answers.draw(row, _preferring(END), 10)
    assert (text, output[-1]) == (b"aaa", END)
    row = answers.row(Grammar("regex", "[a-b]+"), 10, min_tokens=3, stop_ids=(ord("b"),))
    assert ord("a") in answers.next_ids(row)
    assert ord("b") not in answers.next_ids(row)


def test_an_answer_goes_on_where_it_was_preempted(answers):
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 3}))
    begun = [*b"[1,"]
    rng = random.Random(5)
    text, _ = answers.draw(answers.row(grammar, 12, output=begun), rng.choice, 12 - len(begun))
    assert len(json.loads(bytes(begun) + text)) >= 3
    with pytest.raises(ConstraintFailed):  # no answer of this grammar
        answers.row(grammar, 12, output=[*b"{"]).mask()


def test_a_failing_row_says_so_and_gives_no_token(answers):
    row = answers.row(Grammar("choice", '["yes"]'), 20)
    row.mask()
    with pytest.raises(ConstraintFailed):
        row.take(ord("n"))
