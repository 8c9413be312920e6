"""Calls that must be made, or made right: what the engine is asked for, and what the caller gets of it."""

from __future__ import annotations

from array import array

import pytest

from firsttoken.server.config import ServerConfig
from tests.server.test_tools import CALL, OTHER, THINKING, TOOL, TOOL_TEMPLATE, both
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("marked"), ("<tool_call>", "</tool_call>", "<think>", "</think>"))


@pytest.fixture
def asking(make_client):
    """``asking(text, ...)``: a client whose engine says ``text``, and the requests that it got."""

    def make(text: str, **options):
        got = []

        def script(request):
            got.append(request)
            return [*text.encode(), EOS]

        return make_client(script, **{"template": TOOL_TEMPLATE, **options}), got

    return make


@pytest.fixture
async def client_of_tools(make_client):
    async with make_client(template=TOOL_TEMPLATE) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "others"),
    [({"tool_choice": "required"}, True), ({"tool_choice": NAMED}, False), ({"tool_choice": NAMED, "n": 1}, False)],
)
async def test_a_forced_call_is_a_grammar(asking, fields, others):
    making, got = asking(CALL)
    async with making as client:
        message, finish = await both(client, tools=[TOOL, OTHER], **fields)
        assert (len(message["tool_calls"]), message["content"], finish) == (1, None, "tool_calls")
    grammar = got[0].params.grammar
    assert grammar.kind == "lark"
    assert "get_weather" in grammar.source
    assert ('\\"f\\"' in grammar.source) is others


async def test_a_named_tool_is_called_once(asking):
    making, got = asking(CALL + CALL)
    async with making as client:
        for choice, calls in ((NAMED, 1), ("required", 2)):
            message, finish = await both(client, tools=[TOOL, OTHER], tool_choice=choice)
            assert (len(message["tool_calls"]), finish) == (calls, "tool_calls")
    named, required = (got[at].params.grammar.source for at in (0, 2))
    assert "call (" not in named
    assert "call (" in required


async def test_no_choice_no_grammar(asking):
    making, got = asking(CALL)
    async with making as client:
        await both(client, tools=[TOOL])
        await both(client, tools=[STRICT])
    assert [request.params.grammar is not None for request in got] == [False, False, True, True]


async def test_it_is_thought_before_a_forced_call(asking):
    making, got = asking(f"Hm.</think>\n\n{CALL}", template=THINKING)
    async with making as client:
        message, finish = await both(client, tools=[TOOL], tool_choice="required")
        assert (message["reasoning_content"], len(message["tool_calls"]), finish) == ("Hm.", 1, "tool_calls")
        await both(client, tools=[TOOL], tool_choice="required", enable_thinking=False)
    assert "thought" in got[0].params.grammar.source
    assert "thought" not in got[2].params.grammar.source


async def test_marks_that_are_control_tokens_stand_in_the_prompt(asking, marked):
    making, got = asking(
        '\n{"name": "get_weather", "arguments": {}}', template=THINKING, tokenizer=marked, vocab_size=VOCAB_SIZE + 4
    )
    async with making as client:
        message, finish = await both(client, tools=[TOOL], tool_choice="required")
        assert (len(message["tool_calls"]), message["content"], finish) == (1, None, "tool_calls")
        assert "reasoning_content" not in message
        reply = await client.chat(tools=[STRICT])
        assert (reply.status, reply.error["param"]) == (400, "tools")
    begin, _, think, answer = range(VOCAB_SIZE, VOCAB_SIZE + 4)
    # The template has opened a thought, which no call can follow: it is closed, and the call begun.
    assert array("I", got[0].prompt)[-5:].tolist() == [think, answer, 10, 10, begin]


async def test_what_cannot_be_enforced_is_refused(make_client):
    composed = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{"required": ["a"]}]}}}
    async with make_client(config=ServerConfig(tool_parser="qwen3_coder"), template=TOOL_TEMPLATE) as client:
        reply = await client.chat(tools=[composed], tool_choice="required")
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "anyOf" in reply.error["message"]


def with_schema(parameters: dict, **fields: object) -> dict:
    return {"type": "function", "function": {"name": "look_up", "parameters": parameters, **fields}}


@pytest.mark.parametrize(
    ("parameters", "place", "said"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, ".properties.a", '"not" is not supported'),
        (
            {"properties": {"o": {"properties": {"l": {"type": "array", "items": {"uniqueItems": True}}}}}},
            ".properties.o.properties.l.items",
            '"uniqueItems" is not supported',
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"p": {}, "q": {"anyOf": [{}, {"if": {}}]}}},
            ".$defs.q.anyOf[1]",
            '"if" is not supported',
        ),
        ({"properties": {"a b": {"type": "string", "format": "x"}}}, ".properties['a b']", "Unknown format: x"),
        ({"dependentRequired": {"a": ["b"]}}, "", '"dependentRequired" is not supported'),
    ],
)
async def test_a_schema_that_is_refused_is_named_with_its_tool_and_place(client_of_tools, parameters, place, said):
    place = f"tools[1].function.parameters{place}"
    for fields in ({"tool_choice": "required"}, {"tool_choice": "auto"}):
        tool = with_schema(parameters, strict=fields["tool_choice"] == "auto")
        reply = await client_of_tools.chat(tools=[TOOL, tool], **fields)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, place, "unsupported_grammar")
        message = reply.error["message"]
        assert message.startswith(place)
        assert "'look_up'" in message
        assert said in message
        assert "%json" not in message
    assert (await client_of_tools.chat(tools=[TOOL, with_schema(parameters)], max_tokens=4)).status == 200


async def test_so_it_is_in_the_words_of_other_routes(client_of_tools):
    tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}}
    body = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 9}
    reply = await client_of_tools.post("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], **body})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("tools[0].input_schema.properties.a: calls of the tool 'look_up'")


async def test_of_an_answers_schema_the_place_is_told_too(client_of_tools):
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wrong}}
    reply = await client_of_tools.chat(response_format=form)
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert reply.error["message"].endswith('cannot be used: "not" is not supported (at .properties.a)')


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


async def test_an_answer_that_is_held_to_a_schema_may_be_thought_about_or_be_a_call(asking):
    making, got = asking('Hm.</think>\n\n{"a": 3}', template=THINKING)
    async with making as client:
        message, _ = await both(client, response_format=FORMAT)
        assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 3}')
        message, finish = await both(client, response_format=FORMAT, tools=[TOOL])
        assert (message["content"], finish) == ('{"a": 3}', "stop")
        await both(client, response_format=FORMAT, enable_thinking=False)
        await both(client, guided_grammar='start: "a"')
    thought, calls, plain, lark = (request.params.grammar for request in got[::2])
    assert "thought" in thought.source
    assert "calls | answer" in calls.source
    assert plain.kind == "json_schema"
    # A grammar of the caller's own cannot follow a thought: the one that the template opened is closed.
    assert lark.source == 'start: "a"'
    assert bytes(token for token in array("I", got[-1].prompt) if token < 256).endswith(b"<think></think>\n\n")


async def test_a_model_that_was_told_not_to_think_is_not_invited_to_by_a_grammar(asking):
    making, got = asking(CALL, template=TOOL_TEMPLATE + "{% if enable_thinking %}<think>{% endif %}")
    async with making as client:
        for fields in ({"enable_thinking": False}, {}):
            await client.chat(tools=[TOOL], tool_choice="required", **fields)
    assert ["thought" in request.params.grammar.source for request in got] == [False, True]
