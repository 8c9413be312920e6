"""Items of ``/v1/responses`` as the messages of a chat."""

from __future__ import annotations

import msgspec
import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.server.errors import ApiError
from firsttoken.server.responses.items import decode_input, to_messages

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]}
CALLED = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def messages(given, before=()):
    return to_messages(decode_input(msgspec.Raw(msgspec.json.encode(given)), 10_000, 8), before)


@pytest.mark.parametrize("name", ["annotations", "logprobs"])
def test_labels_are_no_deeper_than_they_can_be_told_again(name):
    """Those that could just be read could not be listed: a 500."""
    deep: list = []
    for _ in range(70):
        deep = [deep]
    part = {"type": "output_text", "text": "ok", name: [deep]}
    with pytest.raises(InvalidRequest, match="nested more than 64 deep") as refused:
        messages([{"role": "assistant", "content": [part]}])
    assert refused.value.param == f"input[0].content[0].{name}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{"type": "message", **USER, "id": "msg_1", "status": "completed", "phase": None}], [USER]),
        ([{"role": "developer", "content": "be kind"}], [{"role": "developer", "content": "be kind"}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": "ab"}],
        ),
        ([{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "a"}]),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [{"role": "assistant", "content": "no"}],
        ),
        ([SAID, SAID], [{"role": "assistant", "content": "ok"}] * 2),
        ([CALL], [{"role": "assistant", "tool_calls": CALLED}]),
        (
            [USER, THOUGHT, SAID, CALL, {**CALL, "call_id": "c2"}, OUTPUT],
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "ok",
                    "tool_calls": [*CALLED, {**CALLED[0], "id": "c2"}],
                },
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ],
        ),
        (
            [CALL, {**OUTPUT, "name": "f", "output": [{"type": "input_text", "text": "5"}]}, SAID],
            [
                {"role": "assistant", "tool_calls": CALLED},
                {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"},
                {"role": "assistant", "content": "ok"},
            ],
        ),
        ([CALL, SAID], [{"role": "assistant", "tool_calls": CALLED, "content": "ok"}]),
        ([SAID, THOUGHT], [{"role": "assistant", "content": "ok"}, {"role": "assistant", "reasoning_content": "hm"}]),
        (
            [{"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "in short"}]}, SAID],
            [{"role": "assistant", "reasoning_content": "in short", "content": "ok"}],
        ),
    ],
)
def test_items_become_messages(given, expected):
    assert messages(given) == expected


def test_what_was_called_before_is_known():
    before = messages([USER, CALL])
    assert messages([OUTPUT], before) == [{"role": "tool", "content": "4", "tool_call_id": "c1"}]


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        (3, "input", "must be a string or an array"),
        ([], "input", "empty"),
        (None, "input", "required"),
        ([USER] * 9, "input", "9 items; at most 8"),
        ("x" * 10_001, "input", "context"),
        ([3], "input[0]", "must be an object"),
        ([{"content": "hi"}], "input[0]", "role"),
        ([{"role": "tool", "content": "hi"}], "input[0].role", "tool"),
        ([{"role": "user"}], "input[0]", "content"),
        ([{**USER, "name": "x"}], "input[0].name", "not supported"),
        ([USER, {**USER, "phase": "commentary"}], "input[1].phase", "not supported"),
        ([{"type": "web_search_call"}], "input[0].type", "web_search_call"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type", "item_reference"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type", "input_image"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0]", "text"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}]}],
            "input[0].content[0].prompt_cache_breakpoint",
            "not supported",
        ),
        ([{**CALL, "arguments": {}}], "input[0].arguments", "must be a string"),
        ([{"type": "function_call", "name": "f", "arguments": ""}], "input[0]", "call_id"),
        ([{**CALL, "namespace": "n"}], "input[0].namespace", "not supported"),
        ([CALL, {**OUTPUT, "call_id": "c9"}], "input[1].call_id", "'c9'"),
        ([OUTPUT, CALL], "input[0].call_id", "no function_call before it"),
        ([{**OUTPUT, "output": None}], "input[0].output", "must be a string or an array"),
        ([{**THOUGHT, "encrypted_content": "gAAA"}], "input[0].encrypted_content", "not supported"),
    ],
)
def test_what_is_wrong_is_named(given, param, said):
    with pytest.raises(ApiError) as caught:
        messages(given)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message
