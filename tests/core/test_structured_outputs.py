"""vLLM's names for what an answer must look like."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

import firsttoken
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"json": SCHEMA}, Grammar("json_schema", msgspec.json.encode(SCHEMA).decode())),
        ({"json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"choice": ["yes", "no"]}, Grammar("choice", '["yes","no"]')),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"json_object": True, "disable_any_whitespace": True}, Grammar("json_object")),
    ],
)
def test_each_becomes_the_parameters_grammar(fields: dict[str, Any], grammar: Grammar) -> None:
    params = SamplingParams(structured_outputs=firsttoken.StructuredOutputsParams(**fields))
    assert params == SamplingParams(grammar=grammar)
    assert params.replace(max_tokens=3).grammar == grammar
    assert SamplingParams(structured_outputs=fields).grammar == grammar  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, "takes one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "json_object": True}, "got regex, json_object"),
        ({"json_object": True, "disable_additional_properties": True}, "disable_additional_properties"),
        ({"choice": "yes"}, "choice"),
        ({"json": 5}, "json"),
        ({"regex": ""}, "needs a source"),
    ],
)
def test_what_is_none_of_them_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names) as refused:
        SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    assert refused.value.param is not None


@pytest.mark.parametrize("name", ["structural_tag", "whitespace_pattern", "backend"])
def test_a_field_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        StructuredOutputsParams(regex="a", **{name: "x"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(structured_outputs={"regex": "a", name: "x"})  # type: ignore[arg-type]


def test_two_words_for_it_are_one_too_many() -> None:
    with pytest.raises(InvalidRequest, match="give one of them"):
        SamplingParams(grammar=Grammar("json_object"), structured_outputs=StructuredOutputsParams(json_object=True))
