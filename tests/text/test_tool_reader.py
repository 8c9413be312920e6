"""Tool calls out of text: the same for every split, and nothing of what a model says is lost."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.text.pieces import CallArguments, CallStart, Content
from firsttoken.text.tools.formats import FORMATS
from firsttoken.text.tools.reader import Offer, ToolReader
from tests.support.pieces import Heard, hear, same_for_every_split

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"get_weather": WEATHER, "f": {}}


def reader(form: str, *, hidden: bool = False, parallel: bool = True) -> ToolReader:
    numbers = itertools.count()
    shape = FORMATS[form]
    texts = frozenset(shape.markers) if hidden else frozenset[str]()
    return ToolReader(shape, Offer(TOOLS, parallel), hidden=texts, new_id=lambda: f"id{next(numbers)}")


def read(form: str, text: str, **options: bool) -> Heard:
    return same_for_every_split(lambda: reader(form, **options), text)


CITY = '{"city": "Tōkyō", "note": "a \\"}</tool_call>\\\\"}'
NO_CALL = ""

CALLS = {
    "hermes": ('Sure.<tool_call>{"name":"get_weather","arguments":' + CITY + "}</tool_call>", "Sure.", [CITY]),
    "two": (
        '\n\n<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": 2}]}}\n</tool_call>\n<tool_call>\n'
        '{"name": "f", "arguments": {}}\n</tool_call>\n',
        "",
        ['{"a": [1, {"b": 2}]}', "{}"],
    ),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> ok', "ok", ['{"a": 1}']),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", ["{}"]),
    "null": ('<tool_call>{"name": "f", "arguments": null, "id": "x"}</tool_call>', "", ["{}"]),
    "no end": ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", ['{"a": 1}']),
    "cut off": ('<tool_call>{"name": "f", "arguments": {"a": "b\\', "", ['{"a": "b\\']),
    "wrong bracket": ('<tool_call>{"name": "f", "arguments": {"a": [1}} x', "}} x", ['{"a": [1']),
    "after a failed one": (
        'a <tool_call> no </tool_call> b <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "a <tool_call> no </tool_call> b",
        ["{}"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_hermes(name):
    text, content, arguments = CALLS[name]
    heard = read("hermes", text)
    assert heard.content == content
    assert [one for _, one in heard.named] == arguments
    assert [id_ for id_, _, _ in heard.calls] == [f"id{index}" for index in range(len(arguments))]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "  ",
        "ends with <tool_ca",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>  tail ',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "thought": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>",
        '{"name": "f", "arguments": {}}',
        '<tool_call>{"arguments": {"a": "' + "x" * 20_000 + '"}, "name": "f"}</tool_call>',
    ],
)
def test_what_is_no_call_stays_content_word_for_word(text):
    heard = read("hermes", text)
    assert (heard.content, heard.calls) == (text, [])


def test_marks_that_are_control_tokens_are_not_shown():
    heard = read("hermes", "a <tool_call>oops</tool_call> b", hidden=True)
    assert (heard.content, heard.calls) == ("a oops b", [])
    assert read("llama3", "<|python_tag|>print(1)", hidden=True).content == "print(1)"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('{"type": "function", "name": "f", "parameters": {"a": null}}', "", [("f", '{"a": null}')]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"days": 2}}',
            "",
            [("f", "{}"), ("get_weather", '{"days": 2}')],
        ),
        ('Let me see. <|python_tag|>{"name": "f", "parameters": {}} x', "Let me see.x", [("f", "{}")]),
        (' {"temperature": 3}', ' {"temperature": 3}', []),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ],
)
def test_llama3(text, content, calls):
    heard = read("llama3", text)
    assert (heard.content, heard.named) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}, "id": "abc"}]',
            "",
            [("f", '{"a": 1}'), ("f", "{}")],
        ),
        ('Hi [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}', "Hi", [("f", '{"a": 1}'), ("f", "{}")]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, oops]', ", oops]", [("f", '{"a": 1}')]),
        ("[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]nobody[ARGS]{}", []),
    ],
)
def test_mistral(text, content, calls):
    heard = read("mistral", text)
    assert (heard.content, heard.named) == (content, calls)


def test_mistral_ids_are_as_its_templates_want_them():
    heard = hear(ToolReader(FORMATS["mistral"], Offer(TOOLS)), ["[TOOL_CALLS]f[ARGS]{}"])
    ((id_, _, _),) = heard.calls
    assert len(id_) == 9
    assert id_.isalnum()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nTō\nkyō\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n",
            "ok",
            [("get_weather", '{"city": "Tō\\nkyō", "days": 3, "exact": true}')],
        ),
        ("<function=f>\n</function>", "", [("f", "{}")]),
        ("<tool_call>\n<function=f>\n<parameter=a>\ncut", "", [("f", '{"a": "cut')]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nNaN\n</parameter></function>", "", [("f", '{"a": "NaN"}')]),
        ("<tool_call><function=nobody></function>", "<tool_call><function=nobody></function>", []),
    ],
)
def test_qwen3_coder(text, content, calls):
    heard = read("qwen3_coder", text)
    assert (heard.content, heard.named) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}'),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'),
    ],
)
def test_one_call_is_enough_where_they_may_not_be_parallel(form, text):
    heard = read(form, text, parallel=False)
    assert (heard.content, heard.named) == ("", [("f", "{}")])
    one = reader(form, parallel=False)
    one.push(text)
    assert one.complete


def test_arguments_are_told_as_they_come():
    one = reader("hermes")
    assert one.push('<tool_call>{"name": "f", "arguments": ') == []
    assert one.push('{"a": "b') == [CallStart(0, "id0", "f"), CallArguments(0, '{"a": "b')]
    assert one.push("c") == [CallArguments(0, "c")]
    assert one.push('"}}</tool_call> done') == [CallArguments(0, '"}'), Content("done")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# Of each form with JSON: what stands before a call, the call and what stands between two.
WRITTEN = [
    ("hermes", "", '<tool_call>\n{"name": "f", "arguments": ARGS}\n</tool_call>', "\n"),
    ("llama3", "<|python_tag|>", '{"name": "f", "parameters": ARGS}', "; "),
    ("mistral", "[TOOL_CALLS][", '{"name": "f", "arguments": ARGS}', ", "),
    ("mistral", "", "[TOOL_CALLS]f[ARGS]ARGS", ""),
]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(WRITTEN),
    st.dictionaries(st.text() | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", "; {"]), JSON, max_size=4),
    st.booleans(),
    st.text(max_size=10),
    st.data(),
)
def test_any_arguments_come_back_as_they_were_written(written, arguments, ascii_only, before, data):
    form, opening, call, between = written
    raw = json.dumps(arguments, ensure_ascii=ascii_only)
    one = call.replace("[ARGS]ARGS", f"[ARGS]{raw}") if "[ARGS]" in call else call.replace("ARGS", raw)
    text = f"{before}{opening}{one}{between}{one}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert hear(reader(form), parts).named == [("f", raw), ("f", raw)]


MARKS = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": 1}', "}", "[TOOL_CALLS]", "f", "[ARGS]"]
MARKS += [
    "<|python_tag|>",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    ";",
    "[",
    "]",
    '"',
    "\\",
    " ",
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(MARKS), max_size=10).map("".join), st.booleans())
def test_no_text_depends_on_how_it_was_cut(form, text, hidden):
    whole = hear(reader(form, hidden=hidden), [text])
    assert hear(reader(form, hidden=hidden), text) == whole
    if not whole.calls and not hidden:
        assert whole.content == text


@pytest.mark.parametrize(
    "tail",
    [
        " " * 60_000,
        "BEGINS" * 6_000,
        'BEGINS{"arguments": {"a":' * 2_000,
        'BEGINS{"arguments": "' * 2_000,
        'BEGINS{"arguments": ' + "[" * 60_000,
        'BEGINS{"name": "f", "arguments": {"a": "' + '\\"' * 30_000,
    ],
    ids=["blanks", "marks", "objects", "strings", "brackets", "escapes"],
)
@pytest.mark.parametrize(
    ("form", "begins"), [("hermes", "<tool_call>"), ("llama3", "<|python_tag|>"), ("mistral", "[TOOL_CALLS][")]
)
def test_time_is_linear_in_the_text(form, begins, tail):
    """A model may be asked to say anything. Each of these took many times as long when it was twice as long."""
    began = time.process_time()
    text = tail.replace("BEGINS", begins)
    hear(reader(form), [text[start : start + 4] for start in range(0, len(text), 4)])
    assert time.process_time() - began < 3
