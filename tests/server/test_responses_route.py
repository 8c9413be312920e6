"""``/v1/responses``: what is asked for, the whole answer, its events, and responses that are kept."""

from __future__ import annotations

import asyncio

import pytest

from firsttoken.engine.stub import Fault
from firsttoken.server.config import ServerConfig
from tests.server.conftest import TEMPLATE, forever, say

PATH = "/v1/responses"
KEYS = ServerConfig(api_keys=("one", "two"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def asked(prompts: list[str]):
    """A script that notes the prompts as text (the template's control tokens as !) and answers "ok"."""

    def script(request):
        ids = memoryview(request.prompt).cast("I").tolist()
        prompts.append("".join(chr(one) if one < 256 else "!" for one in ids))
        return say("ok")(request)

    return script


async def ask(client, given="hi", **fields):
    return await client.post(PATH, {"input": given, **fields})


async def test_a_whole_answer(client):
    reply = await ask(client, instructions="be kind", metadata={"a": "b"}, temperature=0.5, user="u", timings=True)
    assert reply.status == 200
    body = reply.json
    message = body["output"][0]
    assert (body["id"][:5], body["object"], body["status"]) == ("resp_", "response", "completed")
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello, world!", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 14,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 38,
    }
    told = {name: body[name] for name in ("instructions", "metadata", "temperature", "user", "store", "model")}
    assert told == {
        "instructions": "be kind",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "user": "u",
        "store": True,
        "model": "stub",
    }
    assert body["timings"]["total_ms"] > 0
    assert "total_ms" in reply.headers["server-timing"]
    [record] = client.llm.recent.latest(1)
    assert (record.response_id, record.route, record.outcome) == (body["id"], PATH, "finished")


async def test_an_answer_that_is_cut_says_so(client):
    body = (await ask(client, max_output_tokens=4)).json
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["content"][0]["text"] == "Hell"


async def test_an_answer_without_a_word_is_an_empty_message(make_client):
    async with make_client(say("")) as client:
        body = (await ask(client)).json
        assert [part["text"] for part in body["output"][0]["content"]] == [""]
        names = [name for name, _ in (await ask(client, stream=True)).named_events]
        assert names[2:4] == ["response.output_item.added", "response.content_part.added"]


async def test_the_events_of_a_stream_in_their_order(client):
    reply = await ask(client, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.named_events
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = list(dict.fromkeys(name for name, _ in events))
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    by_name = dict(events)
    first, last = by_name["response.created"]["response"], by_name["response.completed"]["response"]
    item = by_name["response.output_item.done"]["item"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["output"], last["usage"]["output_tokens"]) == ("completed", [item], 14)
    assert first["id"] == last["id"]
    added = by_name["response.output_item.added"]["item"]
    assert (added["id"], added["status"], added["content"]) == (item["id"], "in_progress", [])
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    assert "".join(data["delta"] for data in deltas) == "Hello, world!"
    assert {(data["item_id"], data["output_index"], data["content_index"]) for data in deltas} == {(item["id"], 0, 0)}
    assert by_name["response.output_text.done"]["text"] == "Hello, world!"
    again = (await ask(client)).json
    assert {**again["output"][0], "id": item["id"]} == item  # the same as without streaming
    assert not client.llm.stats.running


async def test_probabilities_of_all_tokens_of_the_text(make_client):
    async with make_client(say("né!")) as client:
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        body = (await ask(client, **fields)).json
        whole = body["output"][0]["content"][0]["logprobs"]
        assert [bytes(one["bytes"]) for one in whole] == [b"n", b"\xc3", b"\xa9", b"!", b"<|eos|>"]
        assert len(whole[0]["top_logprobs"]) == 1
        done = dict((await ask(client, **fields, stream=True)).named_events)["response.output_text.done"]
        assert done["logprobs"] == whole


async def test_a_conversation_goes_on_from_a_response(make_client):
    prompts: list[str] = []
    async with make_client(asked(prompts)) as client:
        first = (await ask(client, "one", instructions="be kind")).json
        second = (await ask(client, [{"role": "user", "content": "two"}], previous_response_id=first["id"])).json
        third = await ask(client, "three", previous_response_id=second["id"], stream=True, instructions="be brief")
        assert dict(third.named_events)["response.completed"]["response"]["previous_response_id"] == second["id"]
        assert prompts[1] == "!user:one!assistant:ok!user:two!"  # instructions are those of one response
        assert prompts[2] == "!system:be brief!user:one!assistant:ok!user:two!assistant:ok!user:three!"


async def test_a_kept_response_can_be_asked_for_listed_and_deleted(client):
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}], "id": "msg_mine"},
    ]
    body = (await ask(client, items)).json
    path = f"{PATH}/{body['id']}"
    assert (await client.get(path)).json == body
    listed = (await client.get(f"{path}/input_items?order=asc")).json
    texts = [item["content"][0] for item in listed["data"]]
    assert [part["text"] for part in texts] == ["a", "b", "c"]
    assert [part["type"] for part in texts] == ["input_text", "output_text", "input_text"]
    assert (listed["object"], listed["has_more"], listed["last_id"]) == ("list", False, "msg_mine")
    page = (await client.get(f"{path}/input_items?limit=1")).json
    assert (page["data"][0]["id"], page["has_more"]) == ("msg_mine", True)
    rest = (await client.get(f"{path}/input_items?after=msg_mine&limit=5")).json
    assert [item["id"] for item in rest["data"]] == [item["id"] for item in listed["data"][1::-1]]
    for query in ("limit=0", "limit=101", "order=up", "after=msg_x", "include=x"):
        reply = await client.get(f"{path}/input_items?{query}")
        assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])
    assert (await client.get(f"{path}?stream=true")).error["param"] == "stream"
    gone = await client.post(path, method="DELETE")
    assert gone.json == {"id": body["id"], "object": "response", "deleted": True}
    for reply in (await client.get(path), await client.post(path, method="DELETE")):
        assert (reply.status, reply.error["code"]) == (404, "response_not_found")
    reply = await ask(client, previous_response_id=body["id"])
    assert (reply.status, reply.error["param"]) == (404, "previous_response_id")
    assert "Send the whole conversation as input" in reply.error["message"]


async def test_what_is_not_to_be_kept_is_not(make_client):
    async with make_client() as client:
        body = (await ask(client, store=False)).json
        assert body["store"] is False
        assert (await client.get(f"{PATH}/{body['id']}")).status == 404
    async with make_client(config=ServerConfig(responses_store=0)) as client:
        assert (await ask(client)).json["store"] is False
        for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
            reply = await ask(client, **fields)
            assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))


async def test_a_key_does_not_see_what_another_was_answered(make_client):
    async with make_client(config=KEYS) as client:
        reply = await client.post(PATH, {"input": "secret"}, headers=bearer("one"))
        id_ = reply.json["id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            assert (await client.post(f"{PATH}/{id_}{path}", method=method, headers=bearer("two"))).status == 404
            assert (await client.post(f"{PATH}/{id_}{path}", method=method)).status == 401
        going_on = {"input": "hi", "previous_response_id": id_}
        assert (await client.post(PATH, going_on, headers=bearer("two"))).status == 404
        assert (await client.post(PATH, going_on, headers=bearer("one"))).status == 200


async def test_a_failure_after_the_first_event_is_a_failed_response(make_client):
    async with make_client(lambda request: [*b"abc", Fault("bad luck")]) as client:
        name, last = (await ask(client, stream=True)).named_events[-1]
        assert name == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "bad luck"}
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["response"]["output"][0]["content"][0]["text"] == "abc"
        assert (await client.get(f"{PATH}/{last['response']['id']}")).status == 404
        assert client.llm.recent.latest(1)[0].outcome == "failed"
    async with make_client(lambda request: [Fault("bad luck")]) as client:
        reply = await ask(client, stream=True)
        assert (reply.status, reply.error["message"]) == (500, "bad luck")


async def test_a_stopping_server_ends_the_response(make_client):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start(PATH, {"input": "hi", "stream": True})
        await call.first_byte.wait()
        client.app.live.end_all()
        await asyncio.wait_for(call.task, 5)
        name, last = call.reply.named_events[-1]
        assert (name, last["response"]["error"]["code"]) == ("response.failed", "server_error")
        assert "stopping" in last["response"]["error"]["message"]


async def test_a_caller_who_leaves_frees_the_engine(make_client):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start(PATH, {"input": "hi", "stream": True})
        await call.first_byte.wait()
        call.leave()
        await asyncio.wait_for(call.task, 5)
        await client.quiet()
        assert client.llm.stats.aborted == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(one): "" for one in range(17)}}, "metadata"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"input": "boom"}, "input"),
        ({"input": "x" * 5000}, "input"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(client, fields, param):
    reply = await client.post(PATH, {"input": "hi", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "max_tokens" not in reply.error["message"] or param == "max_tokens"


async def test_null_is_as_if_left_out(client):
    names = ["instructions", "store", "stream", "include", "text", "reasoning", "tools", "background", "conversation"]
    assert (await ask(client, **dict.fromkeys(names))).status == 200
    harmless = {"truncation": "disabled", "background": False, "parallel_tool_calls": True, "tool_choice": "auto"}
    empty = {"reasoning": {"effort": None}, "text": {"format": {"type": "text"}, "verbosity": "medium"}}
    assert (await ask(client, **harmless, **empty, include=["file_search_call.results"])).status == 200


async def test_tools_are_called_and_their_results_sent_back(make_client):
    prompts: list[str] = []
    spoken = '<think>Hm.</think>Sure.<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'

    def script(request):
        asked(prompts)(request)
        return say(spoken)(request)

    template = TEMPLATE.replace("{% endfor %}", "{{ m.reasoning_content }}{{ m.tool_calls }}{% endfor %}")
    template += "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}<think>"
    tools = [{"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}]
    async with make_client(script, template=template) as client:
        fields = {"input": [{"role": "user", "content": "hi"}], "tools": tools}
        body = (await client.post(PATH, fields)).json
        assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
        call = body["output"][2]
        assert (call["name"], call["arguments"], body["status"]) == ("add", '{"x": 1}', "completed")
        assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert body["tools"] == [{**tools[0], "strict": False}]
        assert '"name": "add"' in prompts[0]
        streamed = dict((await client.post(PATH, {**fields, "stream": True})).named_events)["response.completed"]
        for ours, theirs in zip(streamed["response"]["output"], body["output"], strict=True):
            assert {**ours, "id": 0, "call_id": 0} == {**theirs, "id": 0, "call_id": 0}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        by_id = {"input": [result], "tools": tools, "previous_response_id": body["id"]}
        whole = {"input": [*fields["input"], *body["output"], result], "tools": tools}
        assert (await client.post(PATH, by_id)).status == (await client.post(PATH, whole)).status == 200
        assert prompts[-1] == prompts[-2]
        assert "Sure.Hm.[{'type': 'function'" in prompts[-1]
        assert "tool:2" in prompts[-1]
        for bad, param in (
            ({"name": "no name!"}, "tools[0].name"),
            ({"parameters": {"type": "x"}}, "tools[0].parameters"),
        ):
            reply = await client.post(PATH, {**fields, "tools": [{**tools[0], **bad}]})
            assert reply.status == 400
            assert reply.error["param"].startswith(param)
            assert "function.name" not in reply.error["message"]
        reply = await client.post(PATH, {**fields, "tool_choice": {"type": "function", "name": "other"}})
        assert (reply.status, reply.error["param"]) == (400, "tool_choice.name")
