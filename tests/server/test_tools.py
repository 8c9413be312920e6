"""Tools and reasoning in chat completions: what a caller sees, streaming or not."""

from __future__ import annotations

import json
from array import array

import pytest

from firsttoken.server.config import ServerConfig
from tests.server.conftest import TEMPLATE, say
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

TOOL_TEMPLATE = TEMPLATE + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
THINKING = TOOL_TEMPLATE + "{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tōkyō"}}\n</tool_call>'
CALL_F = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def joined(events) -> tuple[dict, str | None]:
    """A message like that of a whole answer, put together from a stream; and its finish reason."""
    message: dict = {"content": ""}
    finish = None
    for event in events[:-1]:
        (choice,) = event["choices"]
        finish = choice["finish_reason"] or finish
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
                continue
            (call,) = value
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message["content"] = message["content"] or None
    return message, finish


def without_ids(message: dict) -> dict:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "refusal")}
    return kept | {"calls": calls}


async def both(client, **fields) -> tuple[dict, str]:
    """The answer's message and finish reason, the same streaming and not."""
    whole = (await client.chat(**fields)).json["choices"][0]
    streamed, finish = joined((await client.chat(stream=True, **fields)).events)
    assert without_ids(streamed) == without_ids(whole["message"]) | {"content": whole["message"]["content"] or None}
    assert finish == whole["finish_reason"]
    return whole["message"], finish


async def test_a_call(make_client):
    async with make_client(say("Sure." + CALL), template=TOOL_TEMPLATE) as client:
        message, finish = await both(client, tools=[TOOL])
        assert finish == "tool_calls"
        assert message["content"] == "Sure."
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Tōkyō"}'}


async def test_parallel_calls_and_one_at_most(make_client):
    async with make_client(say(CALL + CALL_F + "x" * 50), template=TOOL_TEMPLATE) as client:
        message, finish = await both(client, tools=[TOOL, OTHER])
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "f"]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert (message["content"], finish) == ("x" * 50, "tool_calls")
        message, finish = await both(client, tools=[TOOL, OTHER], parallel_tool_calls=False)
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
        assert (message["content"], finish) == (None, "tool_calls")
        await client.quiet()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [OTHER]},  # calls another
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": []},
    ],
)
async def test_no_call_no_finish_reason_of_calls(make_client, fields):
    async with make_client(say(CALL), template=TOOL_TEMPLATE) as client:
        message, finish = await both(client, **fields)
        assert (message["content"], finish) == (CALL, "stop")
        assert "tool_calls" not in message


async def test_a_call_cut_short_ends_by_length(make_client):
    async with make_client(say(CALL), template=TOOL_TEMPLATE) as client:
        message, finish = await both(client, tools=[TOOL], max_tokens=len(CALL.encode()) - 20)
        assert finish == "length"
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Tō'


async def test_answers_side_by_side_call_apart(make_client):
    texts = iter([CALL, "no call", CALL_F] * 2)
    async with make_client(lambda request: [*next(texts).encode(), EOS], template=TOOL_TEMPLATE) as client:
        choices = (await client.chat(n=3, tools=[TOOL, OTHER])).json["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
        assert [len(choice["message"].get("tool_calls", ())) for choice in choices] == [1, 0, 1]
        events = (await client.chat(n=3, tools=[TOOL, OTHER], stream=True)).events[:-1]
        ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
        assert [one["finish_reason"] for one in sorted(ends, key=lambda one: one["index"])] == [
            "tool_calls",
            "stop",
            "tool_calls",
        ]


async def test_log_probabilities_cover_every_token(make_client):
    async with make_client(say("Sure." + CALL), template=TOOL_TEMPLATE) as client:
        reply = await client.chat(tools=[TOOL], logprobs=True, stream=True)
        found = [choice["logprobs"] for event in reply.events[:-1] for choice in event["choices"]]
        assert sum(len(one["content"]) for one in found if one) == len(("Sure." + CALL).encode()) + 1


async def test_the_template_reads_the_tools_unless_none_may_be_called(make_client):
    seen = []

    def script(request):
        seen.append(bytes(token for token in array("I", request.prompt) if token < 256).decode())
        return [EOS]

    async with make_client(script, template=TOOL_TEMPLATE) as client:
        await client.chat(tools=[TOOL, OTHER])
        await client.chat(tools=[TOOL], tool_choice="none")
    empty = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(seen[0].partition("<tool_call>")[2]) == [TOOL, {"type": "function", "function": empty}]
    assert "get_weather" not in seen[1]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("marked"), ("<tool_call>", "</tool_call>", "<think>", "</think>"))


async def test_marks_that_are_control_tokens_reach_the_reader_alone(make_client, marked):
    begin, end, think, answer = range(VOCAB_SIZE, VOCAB_SIZE + 4)
    call = b'{"name": "get_weather", "arguments": {}}'
    tokens = [think, *b"hm", answer, begin, *b"oops", end, *b"ok", answer, begin, *call, end, EOS]
    options = {"template": THINKING, "tokenizer": marked, "vocab_size": VOCAB_SIZE + 4}
    async with make_client(lambda request: tokens, **options) as client:
        message, finish = await both(client, tools=[TOOL])
        assert (message["content"], finish) == ("oopsok", "tool_calls")
        assert message["reasoning_content"] == "hm"
        message, finish = await both(client)
        assert (message["content"], message["reasoning_content"], finish) == ("oopsok" + call.decode(), "hm", "stop")
        usage = (await client.chat(tools=[TOOL])).json["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_reasoning(make_client):
    async with make_client(say("Hm.\n</think>\n\nYes."), template=THINKING) as client:
        message, _ = await both(client)
        assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
        usage = (await client.chat()).json["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm.\n</think>")}
        message, _ = await both(client, include_reasoning=False)
        assert without_ids(message) == {"role": "assistant", "content": "Yes.", "calls": []}
        message, _ = await both(client, chat_template_kwargs={"enable_thinking": False})
        assert message["content"] == "Hm.\n</think>\n\nYes."


async def test_parsers_can_be_named_and_turned_off(make_client):
    config = ServerConfig(tool_parser="mistral", reasoning_parser="none")
    async with make_client(say("</think>[TOOL_CALLS]f[ARGS]{}"), config, template=THINKING) as client:
        message, finish = await both(client, tools=[OTHER])
        assert (message["content"], finish) == ("</think>", "tool_calls")
        assert client.app.formats.lines() == ["tool parser mistral", "reasoning parser none"]
    config = ServerConfig(tool_parser="none")
    async with make_client(config=config, template=TOOL_TEMPLATE) as client:
        assert "--tool-parser none" in (await client.chat(tools=[OTHER])).error["message"]


def tool(**fields) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(name="no spaces")]}, "tools[0].function.name"),
        ({"tools": [OTHER, tool(name="x" * 65)]}, "tools[1].function.name"),
        ({"tools": [OTHER, OTHER]}, "tools[1].function.name"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters={"properties": [1]})]}, "tools[0].function.parameters.properties"),
        ({"tools": [tool(parameters={"properties": {"a": 1}})]}, "tools[0].function.parameters.properties.a"),
        ({"tools": [tool(parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [OTHER] * 129}, "tools"),
        ({"tools": [tool(description="x" * 1_100_000)]}, "tools"),
        (
            {"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [OTHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_tools_that_are_wrong_are_refused_by_place(make_client, fields, param):
    async with make_client(template=TOOL_TEMPLATE) as client:
        reply = await client.chat(**fields)
        assert reply.status == 400
        assert (reply.error["param"] or "").startswith(param)


async def test_a_past_call_needs_no_content(make_client):
    past = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": CALLED}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}
    async with make_client(template=TOOL_TEMPLATE) as client:
        sizes = set()
        for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
            messages = [{"role": "user", "content": "hi"}, past | content, result]
            reply = await client.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
            sizes.add(reply.json["usage"]["prompt_tokens"])
        assert len(sizes) == 1


CALLED = {"name": "get_weather", "arguments": '{"city": "Tōkyō"}'}
