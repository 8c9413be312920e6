"""What an answer's text must look like, as it travels."""

from __future__ import annotations

import msgspec
import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import MAX_SOURCE, Grammar
from firsttoken.core.sampling_params import SamplingParams


def test_a_grammar_travels_with_the_parameters() -> None:
    params = SamplingParams(grammar=Grammar("regex", "[0-9]+"))
    raw = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(raw, type=SamplingParams) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams()), type=SamplingParams).grammar is None


@pytest.mark.parametrize(
    ("kind", "source"),
    [("gbnf", "x"), ("regex", ""), ("json_object", "{}"), ("lark", "x" * (MAX_SOURCE + 1)), ("regex", 3)],
)
def test_what_is_no_grammar_is_refused(kind: str, source: object) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        Grammar(kind, source)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [{"allowed_token_ids": [1]}, {"bad_words": ["x"]}])
def test_nothing_may_forbid_a_grammars_way_to_its_end(field: dict[str, list[object]]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        SamplingParams(grammar=Grammar("json_object"), **field)  # type: ignore[arg-type]


def test_the_parameters_take_a_grammar_alone() -> None:
    with pytest.raises(InvalidRequest, match="grammar must be a Grammar"):
        SamplingParams(grammar="[0-9]+")  # type: ignore[arg-type]
