"""``/v1/messages``: what is asked for, the whole answer, its events, its errors."""

from __future__ import annotations

import asyncio
import json

import pytest

from firsttoken.core.service import KeyRule, ServiceClass, Targets
from firsttoken.engine.stub import Fault
from firsttoken.server.config import ServerConfig
from firsttoken.server.conversation import Said
from firsttoken.server.encode import to_json
from firsttoken.server.messages.answer import Blocks
from firsttoken.server.messages.events import MessageEvents
from firsttoken.text.pieces import CallArguments, CallStart
from tests.server.conftest import PIECES, TEMPLATE, forever, say

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]


async def ask(client, messages=USER, **fields):
    return await client.post(PATH, {"messages": messages, "max_tokens": 100, **fields})


def rebuilt(events: list[tuple[str, dict]]) -> dict:
    """The message that a client makes of a stream."""
    message, texts = {}, {}
    for name, data in events:
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            delta, block = data["delta"], message["content"][data["index"]]
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            texts[data["index"], field] = (
                texts.get((data["index"], field), "") + delta["partial_json" if field == "json" else field]
            )
            assert block["type"] == {"text": "text", "thinking": "thinking", "json": "tool_use"}[field]
        elif name == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
    for (index, field), text in texts.items():
        if field == "json":
            message["content"][index]["input"] = json.loads(text)
        else:
            message["content"][index][field] = text
    return message


async def test_a_whole_answer(client):
    reply = await client.post(
        PATH,
        {"messages": USER, "max_tokens": 50, "system": "be kind", "metadata": {"user_id": "u"}, "timings": True},
        headers={"anthropic-version": "2023-06-01", "x-request-id": "mine"},
    )
    assert reply.status == 200
    body = reply.json
    assert body.pop("id").startswith("msg_")
    assert body.pop("timings")["total_ms"] > 0
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "stub",
        "content": [{"type": "text", "text": "Hello, world!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 24,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 14,
            "service_tier": "standard",
        },
    }
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == "mine"
    assert "total_ms" in reply.headers["server-timing"]
    [record] = client.llm.recent.latest(1)
    assert (record.id, record.route, record.outcome) == ("mine", PATH, "finished")


async def test_the_events_of_a_stream_in_their_order(client):
    reply = await ask(client, stream=True)
    events = reply.named_events
    assert list(dict.fromkeys(name for name, _ in events)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = (await ask(client)).json
    assert {**rebuilt(events), "id": 0} == {**whole, "id": 0}


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence", "text"),
    [
        (say("Hello"), {"max_tokens": 3}, "max_tokens", None, "Hel"),
        (say("Hello"), {"stop_sequences": ["lo", "x"]}, "stop_sequence", "lo", "Hel"),
        (say("Hello"), {"stop_token_ids": [ord("l")]}, "end_turn", None, "He"),
        (forever, {"max_tokens": 5000}, "model_context_window_exceeded", None, None),
    ],
)
async def test_why_it_ended(make_client, script, fields, reason, sequence, text):
    async with make_client(script) as client:
        whole = (await ask(client, **fields)).json
        streamed = rebuilt((await ask(client, **fields, stream=True)).named_events)
        for one in (whole, streamed):
            assert (one["stop_reason"], one["stop_sequence"]) == (reason, sequence)
            assert text is None or one["content"][0]["text"] == text


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [2, 3, 4], [4, 1, 1, 3]])
def test_thoughts_words_and_calls_are_blocks_of_their_own_however_they_come(sizes):
    writer, blocks, left = MessageEvents(), Blocks(), list(PIECES)
    raw = writer.begin({"content": []})
    for size in sizes:
        taken, left = left[:size], left[size:]
        blocks.add(taken)
        raw += writer.middle(Said(None, taken, None))
    raw += writer.end(("tool_use", None), {}, None)
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert (
        json.loads(to_json(blocks.shown()))
        == rebuilt(events)["content"]
        == [
            {"type": "thinking", "thinking": "Let me think.", "signature": ""},
            {"type": "text", "text": "I'll ask twice."},
            {"type": "tool_use", "id": "call_a", "name": "add", "input": {"x": 1}},
            {"type": "tool_use", "id": "call_b", "name": "now", "input": {}},
        ]
    )
    stops = [data["index"] for name, data in events if name == "content_block_stop"]
    assert stops == [0, 1, 2, 3]


def test_arguments_that_are_cut_or_none_at_all():
    blocks = Blocks()
    blocks.add([CallStart(0, "call_a", "now"), CallStart(1, "call_b", "add"), CallArguments(1, '{"x":')])
    assert shown_inputs(blocks) == [{}, {"INVALID_JSON": '{"x":'}]


def test_arguments_are_shown_as_written_and_none_are_too_deep_to_be_shown():
    """Those nested deeper than the interpreter goes ended a message with a 500, and long numbers lost their ends."""
    blocks, deep = Blocks(), '{"x":' + "[" * 5000 + "]" * 5000 + "}"
    for text in (deep, '{"x": 0.12345678901234567890}'):
        blocks.add([CallStart(0, "call_a", "f"), CallArguments(0, text)])
    assert shown_inputs(blocks)[0] == {"INVALID_JSON": deep}
    assert b'"input":{"x": 0.12345678901234567890}' in to_json(blocks.shown())


def shown_inputs(blocks: Blocks) -> list:
    return [block["input"] for block in json.loads(to_json(blocks.shown()))]


async def test_tools_are_called_and_their_results_sent_back(make_client):
    prompts = []

    def script(request):
        ids = memoryview(request.prompt).cast("I").tolist()
        prompts.append("".join(chr(one) if one < 256 else "!" for one in ids))
        return say('Sure.<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>')(request)

    template = (
        TEMPLATE.replace("{% endfor %}", "{{ m.tool_calls }}{% endfor %}") + "{% if tools %}<tool_call>{% endif %}"
    )
    tools = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    async with make_client(script, template=template) as client:
        body = (await ask(client, tools=tools)).json
        text, use = body["content"]
        assert (text["text"], use["name"], use["input"]) == ("Sure.", "add", {"x": 1})
        assert body["stop_reason"] == "tool_use"
        streamed = rebuilt((await ask(client, tools=tools, stream=True)).named_events)
        assert streamed["stop_reason"] == "tool_use"
        assert {**streamed["content"][1], "id": 0} == {**use, "id": 0}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "2"}
        turns = [*USER, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
        assert (await ask(client, turns, tools=tools)).status == 200
        assert "assistant:Sure.[{'type': 'function'" in prompts[-1]
        assert "!tool:2" in prompts[-1]
        reply = await ask(client, tools=tools, tool_choice={"type": "tool", "name": "other"})
        assert reply.status == 400
        assert "tool_choice" in reply.error["message"]


async def test_what_the_assistant_has_begun_is_gone_on_with(make_client):
    prompts = []

    def script(request):
        prompts.append(bytes(min(one, 255) for one in memoryview(request.prompt).cast("I").tolist()))
        return say(" Paris.")(request)

    async with make_client(script) as client:
        turns = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
        body = (await ask(client, turns)).json
        assert body["content"] == [{"type": "text", "text": " Paris."}]
        assert prompts[0].endswith(b"assistant:It is")
        counted = await client.post(f"{PATH}/count_tokens", {"messages": turns})
        assert counted.json["input_tokens"] == body["usage"]["input_tokens"] == len(prompts[0])


async def test_a_model_thinks_unless_it_is_told_not_to(make_client):
    template = TEMPLATE + "{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
    async with make_client(say("Hm.</think>Yes."), template=template) as client:
        for thinking in (None, {"type": "adaptive"}):
            body = (await ask(client, thinking=thinking)).json
            assert [block["type"] for block in body["content"]] == ["thinking", "text"]
            assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        body = (await ask(client, thinking={"type": "disabled"})).json
        assert [block["type"] for block in body["content"]] == ["text"]
    async with make_client(template=TEMPLATE + "<think>") as client:
        reply = await ask(client, thinking={"type": "disabled"})
        assert (reply.status, reply.error["message"].partition(" ")[0]) == (400, "thinking")


async def test_the_tokens_of_a_prompt_are_counted(client):
    fields = {"messages": USER, "system": [{"type": "text", "text": "be kind"}], "model": "stub"}
    counted = await client.post(f"{PATH}/count_tokens", fields)
    asked = await ask(client, system=fields["system"])
    assert counted.json == {"input_tokens": asked.json["usage"]["input_tokens"]}
    for more, said in (({"max_tokens": 5}, "max_tokens"), ({"model": "gpt"}, "gpt"), ({"messages": []}, "messages")):
        reply = await client.post(f"{PATH}/count_tokens", {**fields, **more})
        assert reply.status in (400, 404)
        assert said in reply.error["message"]
    assert client.llm.stats.running == 0


async def test_a_failure_after_the_first_event_is_an_error_event(make_client):
    async with make_client(lambda request: [*b"abc", Fault("bad luck")]) as client:
        name, last = (await ask(client, stream=True)).named_events[-1]
        assert (name, last["error"]) == ("error", {"type": "api_error", "message": "bad luck"})
        assert last["request_id"].startswith("req-")
        assert client.llm.recent.latest(1)[0].outcome == "failed"


async def test_a_stopping_server_and_a_caller_who_leaves_end_it(make_client):
    async with make_client(forever, step_s=0.002) as client:
        call, other = (client.start(PATH, {"messages": USER, "max_tokens": 4000, "stream": True}) for _ in "12")
        await call.first_byte.wait()
        await other.first_byte.wait()
        other.leave()
        await asyncio.wait_for(other.task, 5)
        client.app.live.end_all()
        await asyncio.wait_for(call.task, 5)
        assert call.reply.named_events[-1][0] == "error"
        assert not other.reply.complete
        await client.quiet()


async def test_errors_have_anthropics_shape_and_words(make_client):
    config = ServerConfig(
        api_keys=("batch=secret",),
        targets=Targets(keys={"batch": KeyRule(max_class=ServiceClass.P2)}),
        max_body_bytes=5000,
    )
    key = {"x-api-key": "secret"}
    async with make_client(config=config) as client:
        body = {"messages": USER, "max_tokens": 5}
        assert (await client.post(PATH, body, headers=key)).status == 200
        for fields, headers, method, status, kind in [
            ({}, {}, "POST", 401, "authentication_error"),
            ({"service_tier": "p0"}, key, "POST", 403, "permission_error"),
            ({"model": "claude"}, key, "POST", 404, "not_found_error"),
            ({"max_tokens": 0}, key, "POST", 400, "invalid_request_error"),
            ({"system": "x" * 5000}, key, "POST", 413, "request_too_large"),
            ({}, key, "GET", 405, "invalid_request_error"),
        ]:
            reply = await client.post(PATH, {**body, **fields}, headers=headers, method=method)
            assert (reply.status, reply.json["type"], reply.error["type"]) == (status, "error", kind)
            assert reply.error["message"]
        unknown = await client.post(f"{PATH}/batches", body, headers=key)
        assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")
        await client.llm.drain(1)
        reply = await client.post(PATH, body, headers=key)
        assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (503, "api_error", "5")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens must be a number"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": 1.1}, "temperature"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_k": 1.5}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"type": "text", "text": "x", "citations": [1]}]}, "system[0].citations"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"cache_control": {"type": "ephemeral"}, "cache_hint": {"ttl_s": 3}}, "cache_hint"),
        ({"messages": [{"role": "user", "content": "boom"}]}, "no boom here"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(client, fields, said):
    reply = await client.post(PATH, {"messages": USER, "max_tokens": 5, **fields})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert said in reply.error["message"]


async def test_what_changes_nothing_or_says_how_long_to_keep_the_prompt_is_taken(make_client):
    kept = []

    def script(request):
        kept.append(request.retention and request.retention.ttl_ns)
        return say("ok")(request)

    async with make_client(script) as client:
        none = dict.fromkeys(["system", "tools", "tool_choice", "thinking", "metadata", "container", "speed"])
        assert (await ask(client, **none, service_tier="standard_only")).status == 200
        assert (await ask(client, thinking={"type": "disabled"}, tool_choice={"type": "none"})).status == 200
        cached = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
        assert (await ask(client, system=cached)).status == 200
        assert (await ask(client, system=cached, cache_control={"type": "ephemeral", "ttl": "1h"})).status == 200
    assert kept == [None, None, 300 * 10**9, 3600 * 10**9]
