"""The way to the end out of text that goes on until something is said, as what a model thinks before it calls."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from firsttoken.core.grammar import Grammar
from firsttoken.grammar.closing import byte_tokenizer, find_closing
from firsttoken.grammar.source import ends_of, has_json, to_llguidance

THOUGHT = 'thought[suffix="</think>"]: /(.|\\n)*/\n'
BARE = 'bare[suffix="\\n</parameter>\\n"]: /(.|\\n)*/\n'
CALL = 'call: "<call>" %json {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]} "</call>"\n'


@pytest.mark.parametrize(
    ("source", "so_far"),
    [
        (f"start: thought call\n{THOUGHT}{CALL}", ""),
        (f"start: thought call\n{THOUGHT}{CALL}", "Hm, </thi"),
        (f"start: thought call\n{THOUGHT}{CALL}", 'Hm.</think><call>{"a": "x'),
        (f'start: ("<think>" thought)? call\n{THOUGHT}{CALL}', ""),
        (f'start: thought "<a>" bare "<b>" bare\n{THOUGHT}{BARE}', "Hm"),
        (f'start: thought "<a>" bare "<b>" bare\n{THOUGHT}{BARE}', "Hm</think><a>x"),
    ],
)
def test_a_free_stretch_is_ended_by_its_own_end(source, so_far):
    grammar = Grammar("lark", source)
    matcher = LLMatcher(byte_tokenizer(), to_llguidance(grammar), log_level=0)
    assert matcher.consume_tokens(list(so_far.encode()))
    way = find_closing(matcher, json=has_json(grammar), ends=ends_of(grammar))
    assert way is not None
    assert len(way) < 80
    assert matcher.consume_tokens(list(way))
    assert matcher.is_accepting()
