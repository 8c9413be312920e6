import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.text.messages import MAX_NESTED, count_characters, normalize_messages


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def test_arguments_of_too_many_values_are_not_even_parsed() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": [' + "[]," * (MAX_NESTED // 2) + "[]]}"}}
    with pytest.raises(InvalidRequest, match="lists and objects") as caught:
        normalize_messages([{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages"
    normalize_messages([{"role": "assistant", "tool_calls": [call]}])


def test_parts_and_string_are_the_same_message() -> None:
    parts = user([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}])
    assert normalize_messages(parts) == normalize_messages(user("AB")) == [{"role": "user", "content": "AB"}]


@pytest.mark.parametrize("content", ["", None, []])
def test_an_assistant_may_have_said_nothing(content: object) -> None:
    history = [{"role": "user", "content": "A"}, {"role": "assistant", "content": content}, *user("B")]
    assert normalize_messages(history)[1] == {"role": "assistant", "content": ""}
    del history[1]["content"]
    assert normalize_messages(history)[1]["content"] == ""


def test_past_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Tōkyō"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    [plain] = normalize_messages([message])
    assert plain["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Tōkyō"}}
    call["function"] = {"name": "f", "arguments": "not json"}
    assert normalize_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == "not json"


def test_a_developer_is_the_system_unless_the_template_knows_the_role() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert normalize_messages(message)[0]["role"] == "system"
    assert normalize_messages(message, developer=True)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([*user("a"), {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (user(None), "messages[0].content"),
        (user(5), "messages[0].content"),
        (user({"type": "text", "text": "x"}), "messages[0].content"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user(["x"]), "messages[0].content[0].type"),
        (user([{"type": "text", "text": None}]), "messages[0].content[0].text"),
        (user("\ud800"), "messages[0].content"),
        (user([{"type": "text", "text": "\udc00"}]), "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
        ([{"role": "assistant", "content": None, "refusal": "No."}], "messages[0].refusal"),
        ([{"role": "user", "content": "x", "\udc00" * 99: 1}], "messages[0]." + "\\udc00" * 2),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(messages: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages(messages)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert len(caught.value.message) < 300
    assert caught.value.message.encode("utf-8")


def test_characters_are_counted_in_every_form_and_any_rubbish_counts_nothing() -> None:
    assert count_characters([*user("abc"), *user([{"type": "text", "text": "de"}, {"type": "x"}, 3]), 7]) == 5
    assert count_characters(None) == count_characters("abc") == count_characters(user(5)) == 0
