"""Grammars of calls, asked of the library that enforces them: what they allow is what the reader reads."""

from __future__ import annotations

import llguidance
import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.text.reasoning import REASONING_FORMATS
from firsttoken.text.thought_grammar import Thought, lark, rule_of
from firsttoken.text.tools.formats import FORMATS, Mistral
from firsttoken.text.tools.grammar import forced_calls, strict_calls
from firsttoken.text.tools.reader import Offer, ToolReader
from tests.support.pieces import hear

END = 256
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["city"],
    },
    "f": {"type": "object", "properties": {}},
}
FORMS = {**FORMATS, "mistral named": Mistral(named=True)}
# A call of each, and both.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tōkyō"}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "{0}\n{1}",
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Tōkyō"}}',
        '{"name": "f", "parameters": {}}',
        "{0}; {1}",
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Tōkyō"}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        '[TOOL_CALLS][{{"name": "get_weather", "arguments": {{"city": "Tōkyō"}}}}, {{"name": "f", "arguments": {{}}}}]',
    ),
    "mistral named": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Tōkyō"}', "[TOOL_CALLS]f[ARGS]{}", "{0}{1}"),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nTōkyō\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "{0}\n{1}",
    ),
}
THOUGHTS = {"no": "", "on": "Hm.\n</think>\n\n", "first": "<think>\nHm.\n</think>\n\n"}


class _Bytes:
    """A vocabulary of bytes, as llguidance asks for one."""

    is_tokenizer_wrapper = True

    def __init__(self) -> None:
        self.tokens = [*(bytes((byte,)) for byte in range(256)), b"<end>"]
        self.special_token_ids = [END]
        self.eos_token_id = END
        self.bos_token_id = None

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def allows():
    tokenizer = llguidance.LLTokenizer(_Bytes(), eos_token=END, slices=[])

    def allows(grammar: Grammar, text: str) -> bool:
        source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
        assert not matcher.is_error(), (matcher.get_error(), grammar.source)
        tokens = list(text.encode())
        taken = matcher.validate_tokens(tokens)
        return taken == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()

    return allows


def thought(thinks) -> Thought:
    return Thought.of(REASONING_FORMATS["qwen3"], thinks)


@pytest.mark.parametrize("thinks", THOUGHTS)
@pytest.mark.parametrize("name", FORMS)
def test_forced_calls_are_calls_and_nothing_else(allows, name, thinks):
    one, other, both = CALLS[name]
    before = THOUGHTS[thinks]
    both = both.format(one, other)
    forced = forced_calls(FORMS[name], SCHEMAS, (), thought(thinks), parallel=True)
    assert forced.begun == ""
    for text in (one, other, both):
        assert allows(forced.grammar, before + text)
        assert hear(ToolReader(FORMS[name], Offer(SCHEMAS)), [text]).content == ""
    for text in ("", "Sure.", f"Sure. {one}", one.replace("city", "town"), one.replace("get_weather", "g"), one[:-1]):
        assert not allows(forced.grammar, before + text), text
    single = forced_calls(FORMS[name], SCHEMAS, (), thought(thinks), parallel=False)
    assert allows(single.grammar, before + one)
    assert not allows(single.grammar, before + both)


@pytest.mark.parametrize("thinks", THOUGHTS)
@pytest.mark.parametrize("name", FORMS)
def test_strict_calls_leave_everything_else_free(allows, name, thinks):
    one, other, both = CALLS[name]
    before = THOUGHTS[thinks]
    grammar = strict_calls(FORMS[name], SCHEMAS, thought(thinks), parallel=True)
    for text in ("", "No call: < [ x", one, both.format(one, other)):
        assert allows(grammar, before + text), text
    if not FORMS[name].bare:
        assert allows(grammar, f"{before}Sure. {one} And so.")
    assert not allows(grammar, before + one.replace("city", "town"))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.bare])
def test_calls_beside_an_answer_that_is_held_to_a_schema(allows, name):
    one, _, _ = CALLS[name]
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammar = strict_calls(FORMS[name], SCHEMAS, Thought(), parallel=True, answer=Grammar("json_schema", schema))
    assert allows(grammar, '{"a": 3}')
    assert allows(grammar, one)
    assert not allows(grammar, "Sure.")


@pytest.mark.parametrize(
    ("name", "count", "begun", "rest"),
    [
        ("hermes", 2, "<tool_call>", '\n{"name": "f", "arguments": {}}'),
        ("mistral", 2, "[TOOL_CALLS]", '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'),
        ("mistral named", 2, "[TOOL_CALLS]", "f[ARGS]{}"),
        ("mistral named", 1, "[TOOL_CALLS]f[ARGS]", "{}"),
        ("llama3", 1, "", '{"name": "f", "parameters": {}}'),
        ("qwen3_coder", 2, "<tool_call>", "\n<function=f>\n</function>"),
    ],
)
def test_control_tokens_stand_in_the_prompt(allows, name, count, begun, rest):
    form = FORMS[name]
    schemas = SCHEMAS if count > 1 else {"f": SCHEMAS["f"]}
    forced = forced_calls(form, schemas, form.markers, Thought(), parallel=True)
    assert forced.begun == begun
    assert allows(forced.grammar, rest)
    reader = ToolReader(form, Offer(schemas), hidden=frozenset(form.markers))
    assert reader.push(begun) == []
    assert hear(reader, [rest]).content == ""
    assert reader.calls


def test_bare_arguments_keep_to_what_can_be_told_of_them(allows):
    form = FORMS["qwen3_coder"]
    properties = {"n": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}}
    schema = {"type": "object", "properties": properties, "required": ["n", "unit"]}
    grammar = forced_calls(form, {"f": schema}, (), Thought(), parallel=False).grammar
    text = "<tool_call>\n<function=f>\n<parameter=n>\n{}\n</parameter>\n<parameter=unit>\n{}\n</parameter>\n</function>"
    assert allows(grammar, text.format(3, "C") + "\n</tool_call>")
    assert not allows(grammar, text.format("x", "C") + "\n</tool_call>")
    assert not allows(grammar, text.format(3, "K") + "\n</tool_call>")
    for bad in ({"$ref": "#/$defs/x"}, {"properties": {"a": {"type": "string", "pattern": "x"}}}):
        with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
            forced_calls(form, {"f": bad}, (), Thought(), parallel=False)
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json_object", "", '{"a": [1]}', "[1]"),
        ("json_schema", '{"type": "integer"}', "3", '"3"'),
        ("choice", '["a/b", "c\\"d"]', 'c"d', "c"),
        ("regex", "[a-c]+/d", "abc/d", "abcd"),
        ("regex", r"a\/b\\\n?", "a/b\\", "a/b"),
        ("regex", "a\nb", "a\nb", "ab"),
    ],
)
def test_other_grammars_hold_after_what_was_thought(allows, kind, source, right, wrong):
    rule = rule_of(Grammar(kind, source))
    for thinks, before in THOUGHTS.items():
        grammar = lark("answer", [f"answer: {rule}"], thought(thinks))
        assert allows(grammar, before + right)
        assert not allows(grammar, before + wrong)


def test_a_lark_grammar_is_no_part_of_another():
    grammar = Grammar("lark", 'start: "a"')
    assert rule_of(grammar) is None
    with pytest.raises(InvalidRequest, match="Lark"):
        strict_calls(FORMS["hermes"], SCHEMAS, Thought(), parallel=True, answer=grammar)
