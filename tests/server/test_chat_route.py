"""Chat completions: the shapes OpenAI's clients read."""

from __future__ import annotations

import asyncio

import pytest

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.engine.stub import Fault
from tests.support.byte_tokenizer import BOS
from tests.support.byte_tokenizer import EOS as END


def contents(events, index=0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


async def test_whole_answer(client):
    reply = await client.chat("hi", model="stub")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "stub"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = len("user:hi") + 2  # the template's two specials
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 14,
        "total_tokens": prompt + 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_stream(client):
    reply = await client.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    chunks = reply.events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert contents(chunks) == "Hello, world!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_chunk_is_last_and_alone(client):
    whole = (await client.chat()).json["usage"]
    events = (await client.chat(stream=True, stream_options={"include_usage": True})).events
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole
    assert all(event["usage"] is None and event["choices"] for event in events[:-2])


async def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await client.chat(stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 14


async def test_cached_tokens_are_reported(make_client):
    async with make_client(cached_tokens=5) as client:
        assert (await client.chat()).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
        events = (await client.chat(stream=True, stream_options={"include_usage": True})).events
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_of_n_ends_once(make_client, stream):
    lengths = iter([1, 9, 3, 30, 2, 2, 17, 5] * 2)
    async with make_client(lambda request: [ord("a")] * next(lengths) + [END]) as client:
        reply = await client.chat(n=8, stream=stream, max_tokens=64)
        if not stream:
            choices = reply.json["choices"]
            assert [choice["index"] for choice in choices] == list(range(8))
            assert [len(choice["message"]["content"]) for choice in choices] == [1, 9, 3, 30, 2, 2, 17, 5]
            assert reply.json["usage"]["completion_tokens"] == 69 + 8
            return
        found = [choice for event in reply.events[:-1] for choice in event["choices"]]
        ends = [choice["index"] for choice in found if choice["finish_reason"]]
        assert sorted(ends) == list(range(8))
        starts = [choice["index"] for choice in found if "role" in choice["delta"]]
        assert sorted(starts) == list(range(8))
        assert [len(contents(reply.events, index)) for index in range(8)] == [1, 9, 3, 30, 2, 2, 17, 5]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(client, stream):
    reply = await client.chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        found = [choice["logprobs"] for event in reply.events[:-1] for choice in event["choices"]]
        entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        entries = reply.json["choices"][0]["logprobs"]["content"]
    assert len(entries) == 14
    assert entries[0]["token"] == "H"
    assert entries[0]["bytes"] == [72]
    assert entries[0]["logprob"] == -0.5
    assert [(top["token"], top["logprob"]) for top in entries[0]["top_logprobs"]] == [("H", -0.5), ("I", -1.5)]


async def test_logprobs_without_alternatives(client):
    entries = (await client.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {0}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_and_reason(client, stream):
    reply = await client.chat(stop=["wor"], stream=stream)
    if stream:
        assert contents(reply.events) == "Hello, "
        last = reply.events[-2]["choices"][0]
    else:
        last = reply.json["choices"][0]
        assert last["message"]["content"] == "Hello, "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "wor")


async def test_characters_over_several_tokens_arrive_whole(make_client):
    async with make_client(lambda request: [*"ď🔥".encode(), END]) as client:
        reply = await client.chat(stream=True)
        pieces = [event["choices"][0]["delta"].get("content", "") for event in reply.events[:-1]]
        assert "".join(pieces) == "ď🔥"
        assert not any("\ufffd" in piece for piece in pieces)
        cut = await client.chat(stream=True, max_tokens=4)
        assert contents(cut.events) == (await client.chat(max_tokens=4)).json["choices"][0]["message"]["content"]


async def test_bytes_that_are_no_text(make_client):
    async with make_client(lambda request: [0xF0, 0x27, ord("x"), END]) as client:
        for stream in (False, True):
            reply = await client.chat(stream=stream, logprobs=True, top_logprobs=1)
            assert reply.status == 200
            text = contents(reply.events) if stream else reply.json["choices"][0]["message"]["content"]
            assert text == "\ufffd'x"


async def test_token_ids_when_asked(client):
    choice = (await client.chat(return_token_ids=True, max_tokens=2)).json
    assert choice["choices"][0]["token_ids"] == [72, 101]
    assert choice["prompt_token_ids"][0] == BOS
    events = (await client.chat(return_token_ids=True, max_tokens=2, stream=True)).events
    ids = [token for event in events[:-1] for token in event["choices"][0].get("token_ids", [])]
    assert ids == [72, 101]


async def test_timings(client):
    reply = await client.chat(timings=True)
    timings = reply.json["timings"]
    assert timings["total_ms"] > 0
    assert timings["tokenize_ms"] >= 0
    assert timings["parse_ms"] > 0
    assert "total_ms;dur=" in reply.headers["server-timing"]
    events = (await client.chat(timings=True, stream=True)).events
    assert events[-2]["timings"]["total_ms"] > 0
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert "timings" not in (await client.chat()).json


async def test_content_type_and_model_are_optional(client):
    headers = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"messages":[{"role":"user","content":"hi"}],"temperature":0}'
    assert (await client.post("/v1/chat/completions", body, headers=headers)).status == 200


async def test_another_model_is_not_found(client):
    reply = await client.chat(model="gpt-9")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


async def test_template_kwargs_reach_the_template(client):
    plain = (await client.chat()).json["usage"]["prompt_tokens"]
    loud = (await client.chat(chat_template_kwargs={"shout": True, "enable_thinking": False})).json["usage"]
    assert loud["prompt_tokens"] == plain + len("SHOUT ")
    bare = (await client.chat(add_generation_prompt=False)).json["usage"]["prompt_tokens"]
    assert bare == plain - 1


async def test_text_parts_are_the_same_prompt(client):
    plain = (await client.chat("A")).json["usage"]["prompt_tokens"]
    assert (await client.chat([{"type": "text", "text": "A"}])).json["usage"]["prompt_tokens"] == plain


async def test_sampling_comes_from_the_request_then_the_checkpoint(make_client):
    seen = []

    def script(request):
        seen.append(request)
        return [END]

    generation = GenerationConfig(eos_token_ids=(END,), temperature=0.25, top_k=7, repetition_penalty=1.1)
    async with make_client(script, generation=generation) as client:
        await client.chat()
        await client.chat(temperature=0, top_k=3.0, seed=5, priority=-2, min_p=0.1, max_completion_tokens=9)
    first, second = seen
    assert (first.params.temperature, first.params.top_k, first.params.top_p) == (0.25, 7, 1.0)
    assert first.params.repetition_penalty == 1.1
    assert (second.params.temperature, second.params.top_k, second.params.min_p) == (0, 3, 0.1)
    assert (second.params.seed, second.priority, second.max_tokens) == (5, -2, 9)


async def test_end_tokens_and_ignore_eos(make_client):
    generation = GenerationConfig(eos_token_ids=(255, END))
    async with make_client(lambda request: [*b"ok", 255, *b"junk"], generation=generation) as client:
        choice = (await client.chat()).json["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "stop")
        ignored = (await client.chat(ignore_eos=True, stop_token_ids=[ord("k")])).json["choices"][0]
        assert ignored["stop_reason"] == ord("k")
        ignored = (await client.chat(ignore_eos=True, max_tokens=5)).json["choices"][0]
        assert ignored["finish_reason"] == "length"


async def test_request_ids(client):
    both = await asyncio.gather(
        *(
            client.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hi"}]},
                headers={"X-Request-Id": "same"},
            )
            for _ in range(2)
        )
    )
    assert [reply.headers["x-request-id"] for reply in both] == ["same", "same"]
    assert both[0].json["id"] != both[1].json["id"]
    assert all(reply.json["choices"][0]["message"]["content"] == "Hello, world!" for reply in both)
    odd = {"X-Request-Id": "a\tb\x01" + "x" * (1 << 20)}
    reply = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, headers=odd)
    assert reply.status == 200
    assert reply.headers["x-request-id"] == "ab" + "x" * 126


async def test_failure_before_the_first_token_is_a_plain_status(make_client):
    async with make_client(lambda request: [Fault("bad luck")]) as client:
        reply = await client.chat(stream=True)
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert "bad luck" in reply.error["message"]


async def test_failure_after_it_is_one_event_and_the_end(make_client):
    async with make_client(lambda request: [*b"abc", Fault("bad luck")]) as client:
        reply = await client.chat(stream=True)
        assert reply.status == 200
        assert reply.complete
        assert contents(reply.events[:-1]) == "abc"
        assert "bad luck" in reply.events[-1]["error"]["message"]
        assert sum(1 for event in reply.events if "error" in event) == 1


async def test_refused_by_the_engine(make_client):
    async with make_client(kv_blocks=2) as client:
        for stream in (False, True):
            reply = await client.chat(max_tokens=100, stream=stream)
            assert (reply.status, reply.error["code"]) == (400, "kv_capacity_exceeded")


async def test_no_template_no_chat(make_client):
    async with make_client(template=None) as client:
        reply = await client.chat()
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert (await client.complete()).status == 200


async def test_dead_engine(make_client):
    async with make_client(lambda request: [*b"abc", Fault("gone", fatal=True)]) as client:
        reply = await client.chat(stream=True)
        assert reply.complete
        assert reply.events[-1]["error"]["code"] == "engine_dead"
        after = await client.chat()
        assert (after.status, after.error["code"]) == (503, "engine_dead")
        assert (await client.get("/health/live")).status == 503
