"""Messages of blocks as the messages of a chat."""

from __future__ import annotations

import msgspec
import pytest

from firsttoken.server.errors import ApiError
from firsttoken.server.messages.blocks import cache_controls, decode_turns, to_messages
from firsttoken.server.messages.schema import TextBlock

USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "ok"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "abc"}
USED = [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def decoded(given):
    return decode_turns(msgspec.Raw(msgspec.json.encode(given)), 10_000, 8)


def users(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistants(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def result(content: str):
    return {"role": "tool", "content": content, "tool_call_id": "t1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([USER], [USER]),
        ([users(TEXT, TEXT)], [{"role": "user", "content": "okok"}]),
        ([USER, users(TEXT, TEXT), USER], [{"role": "user", "content": "hi\n\nokok\n\nhi"}]),
        ([USER, {"role": "assistant", "content": "a"}, USER], [USER, {"role": "assistant", "content": "a"}, USER]),
        (
            [USER, assistants(THOUGHT, TEXT, USE), users(RESULT, TEXT)],
            [
                USER,
                {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": USED},
                result("4"),
                {"role": "user", "content": "ok"},
            ],
        ),
        (
            [assistants(USE), users({**RESULT, "is_error": True}), users({**RESULT, "content": [TEXT, TEXT]})],
            [{"role": "assistant", "content": "", "tool_calls": USED}, result("Error: 4"), result("okok")],
        ),
        (
            [assistants(USE), users({"type": "tool_result", "tool_use_id": "t1", "is_error": False})],
            [{"role": "assistant", "content": "", "tool_calls": USED}, result("")],
        ),
        (
            [USER, {"role": "system", "content": [TEXT]}, USER],
            [USER, {"role": "system", "content": "ok"}, USER],
        ),
        (
            [users({**TEXT, "cache_control": {"type": "ephemeral"}, "citations": None})],
            [{"role": "user", "content": "ok"}],
        ),
    ],
)
def test_turns_become_messages(given, expected):
    assert to_messages(decoded(given), None) == expected


def test_the_system_prompt_comes_first():
    assert to_messages(decoded([USER]), "be brief") == [{"role": "system", "content": "be brief"}, USER]
    parts = [TextBlock(text="be "), TextBlock(text="brief")]
    assert to_messages(decoded([USER]), parts) == [{"role": "system", "content": "be brief"}, USER]


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        (None, "messages", "required"),
        (3, "messages", "must be an array"),
        ([], "messages", "empty"),
        ([USER] * 9, "messages", "9 messages; at most 8"),
        ([{"role": "user", "content": "x" * 10_000}], "messages", "context"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "tool"),
        ([{"role": "user"}], "messages[0]", "content"),
        ([{**USER, "name": "x"}], "messages[0].name", "not supported"),
        ([users()], "messages[0].content", "empty"),
        ([users({"type": "image", "source": {}})], "messages[0].content[0].type", "image"),
        ([USER, users({"type": "text"})], "messages[1].content[0]", "text"),
        ([users(USE)], "messages[0].content[0].type", "not the user's to send"),
        ([users(THOUGHT)], "messages[0].content[0].type", "not the user's to send"),
        ([assistants(RESULT)], "messages[0].content[0].type", "not the assistant's to send"),
        ([assistants({"type": "redacted_thinking", "data": "x"})], "messages[0].content[0].type", "redacted_thinking"),
        ([assistants({**USE, "input": "{}"})], "messages[0].content[0].input", "must be an object"),
        ([assistants({**USE, "toolset_name": "x"})], "messages[0].content[0].toolset_name", "not supported"),
        ([users({**TEXT, "citations": [{}]})], "messages[0].content[0].citations", "not supported"),
        (
            [users({**TEXT, "cache_control": {"type": "ephemeral", "ttl": "2h"}})],
            "messages[0].content[0].cache_control.ttl",
            "2h",
        ),
        (
            [assistants(USE), users({**RESULT, "content": [{"type": "image"}]})],
            "messages[1].content[0].content[0].type",
            "image",
        ),
        ([users(RESULT)], "messages[0].content[0].tool_use_id", "'t1'"),
        ([users(RESULT), assistants(USE)], "messages[0].content[0].tool_use_id", "no tool_use before it"),
    ],
)
def test_what_is_wrong_is_named(given, param, said):
    with pytest.raises(ApiError) as caught:
        to_messages(decoded(given), None)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message


def test_wishes_to_keep_the_prompt_are_found_wherever_they_stand():
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    turns = decoded(
        [
            users({**TEXT, **kept}),
            assistants(TEXT, {**USE, **kept}),
            users({**RESULT, **kept, "content": [{**TEXT, **kept}]}),
        ]
    )
    assert [one.ttl for one in cache_controls(turns, "none here")] == ["1h"] * 4
