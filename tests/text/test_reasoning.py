"""Reasoning out of text, with what follows it."""

from __future__ import annotations

import pytest

from firsttoken.core import parser_names
from firsttoken.text.pieces import Reasoning
from firsttoken.text.reasoning import REASONING_FORMATS, ReasoningReader
from firsttoken.text.tools.formats import FORMATS
from firsttoken.text.tools.reader import Offer, ToolReader
from tests.support.pieces import same_for_every_split

QWEN3, R1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]


def reader(*, inside: bool, tools: bool = False) -> ReasoningReader:
    rest = ToolReader(FORMATS["hermes"], Offer({"f": {}}), new_id=lambda: "id") if tools else None
    return ReasoningReader(QWEN3, rest, inside=inside)


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nOkay, 1 < 2.\n</think>\n\nAnswer </think>", False, "Okay, 1 < 2.", "Answer </think>"),
        ("<think>\nOkay\n</think>\n\nAnswer", True, "Okay", "Answer"),
        ("Okay </th </think>Answer", True, "Okay </th", "Answer"),
        ("<think></think>\n hi", False, "", "hi"),
        ("<think> never ends </thin", False, "never ends </thin", ""),
        ("<thi", False, "", "<thi"),
        (" plain <think>x</think>", False, "", " plain <think>x</think>"),
        ("", True, "", ""),
        ("  ", False, "", "  "),
    ],
)
def test_reasoning_stands_before_the_answer(text, inside, reasoning, content, tools):
    heard = same_for_every_split(lambda: reader(inside=inside, tools=tools), text)
    assert (heard.reasoning, heard.content, heard.calls) == (reasoning, content, [])


def test_tools_are_called_after_it_and_not_in_it():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    heard = same_for_every_split(lambda: reader(inside=True, tools=True), f"Should I {call}?\n</think>\n\n{call}")
    assert (heard.reasoning, heard.content, heard.named) == (f"Should I {call}?", "", [("f", "{}")])


def test_it_is_told_as_it_comes():
    one = reader(inside=True)
    assert one.push("Let me ") == [Reasoning("Let me")]
    assert one.push("see<") == [Reasoning(" see")]
    assert one.push("b") == [Reasoning("<b")]


@pytest.mark.parametrize(
    ("prompt", "begun", "qwen3", "r1"),
    [
        ("<|assistant|><think>\n", "", "on", "on"),
        ("<|assistant|>", "", "first", "on"),
        ("<|assistant|>\n<think>\n\n</think>\n\n", "", "no", "no"),
        ("<|assistant|>So", "So", "no", "on"),
        ("<|assistant|><think>So", "<think>So", "on", "on"),
        ("<|assistant|><think>a</think>So", "<think>a</think>So", "no", "no"),
    ],
)
def test_where_a_prompt_leaves_it(prompt, begun, qwen3, r1):
    assert (QWEN3.after(prompt, begun), R1.after(prompt, begun)) == (qwen3, r1)


def test_each_reader_has_its_name_where_names_are_checked():
    assert (parser_names.AUTO, *FORMATS, parser_names.NONE) == parser_names.TOOL_PARSERS
    assert (parser_names.AUTO, *REASONING_FORMATS, parser_names.NONE) == parser_names.REASONING_PARSERS
