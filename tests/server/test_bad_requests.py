"""Whatever is wrong gets a 4xx that names it, in OpenAI's shape, and the engine lives."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.server.config import ServerConfig
from firsttoken.server.refusals import HARMLESS, refused_fields
from firsttoken.server.schema import ChatRequest, CompletionRequest, StreamOptions, TokenizeRequest
from tests.server.conftest import forever

MESSAGES = [{"role": "user", "content": "hi"}]


async def assert_refused(client, path, body, param=..., status=400):
    reply = await client.post(path, body)
    assert reply.status == status, reply.body
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["message"]
    if param is not ...:
        assert reply.error["param"] == param, reply.error
    return reply


NULLS = ["max_tokens", "stop", "seed", "n", "top_p", "logprobs", "stream_options", "user", "logit_bias", "tools"]


@pytest.mark.parametrize("name", [*NULLS, "top_logprobs", "max_completion_tokens", "response_format", "store"])
async def test_null_is_left_out_in_chat(client, name):
    plain, null = await client.chat(temperature=0), await client.chat(temperature=0, **{name: None})
    assert null.status == 200
    assert null.json["choices"] == plain.json["choices"]


@pytest.mark.parametrize("name", [one for one in NULLS if one != "tools"] + ["suffix", "best_of", "echo"])
async def test_null_is_left_out_in_completions(client, name):
    plain, null = await client.complete(temperature=0), await client.complete(temperature=0, **{name: None})
    assert null.status == 200
    assert null.json["choices"] == plain.json["choices"]


HARMLESS_FIELDS = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "n": 1.0,
    "max_tokens": 20.0,
    "seed": 7.0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "stop": [],
    "continue_final_message": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "stream": False,
}


async def test_harmless_fields_are_accepted(client):
    assert (await client.chat(**HARMLESS_FIELDS)).status == 200


REFUSED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning_effort": "high",
    "verbosity": "low",
    "service_tier": "scale",
    "store": True,
    "echo": True,
    "chat_template": "{{ messages }}",
    "continue_final_message": True,
    "use_beam_search": True,
    "nonsense": 1,
    "Temperature": 1,
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_we_do_not_implement_is_refused_by_name(client, name):
    await assert_refused(client, "/v1/chat/completions", {"messages": MESSAGES, name: REFUSED[name]}, name)


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 2), ("messages", MESSAGES), ("tools", [1])])
async def test_refused_in_completions(client, name, value):
    await assert_refused(client, "/v1/completions", {"prompt": "hi", name: value}, name)


def test_every_unimplemented_field_has_a_decision():
    for struct in (ChatRequest, CompletionRequest, TokenizeRequest, StreamOptions):
        assert set(refused_fields(struct)) <= set(HARMLESS)


BAD_CHAT = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**20}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"priority": 2**40}, "priority"),
    ({"service_tier": "P0"}, "service_tier"),
    ({"service_tier": ""}, "service_tier"),
    ({"service_tier": 0}, "service_tier"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"deadline_ms": -5}, "deadline_ms"),
    ({"deadline_ms": 1e12}, "deadline_ms"),
    ({"deadline_ms": "10ms"}, "deadline_ms"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"logit_bias": {"99999999": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"nonsense": 3}}, "stream_options.nonsense"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": "yes"}, "stream"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"model": 3}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "boom"}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": MESSAGES * 5000}, "messages"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=[json.dumps(fields)[:40] for fields, _ in BAD_CHAT])
async def test_bad_chat_fields(client, fields, param):
    for stream in ({}, {"stream": True}):
        await assert_refused(client, "/v1/chat/completions", {"messages": MESSAGES, **stream, **fields}, param)


BAD_PROMPTS = [None, "", [], [[]], {}, 3, [-1], [99999999], [1.5], [1, "a"], ["a", 1], [[["a"]]], [2**40]]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
async def test_bad_prompts(client, prompt):
    reply = await assert_refused(client, "/v1/completions", {"prompt": prompt})
    assert reply.error["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ],
)
async def test_bad_completion_fields(client, fields, param):
    await assert_refused(client, "/v1/completions", {"prompt": "hi", **fields}, param)


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"messages":[{"role":"user","content":"\xff"}]}',
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"messages":[{"role":"user","content":"\\udc00x"}]}',
    b'{"messages":[{"role":"\\ud800\\ud800","content":"x"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"stop":"\\ud83d"}',
    b'{"messages":[{"role":"user","content":"x"}],"\\ud83d":1}',
    b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
    b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 5000 + b"}",
    b'{"messages":[{"role":"user","content":"x"}],"metadata":{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
    b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"messages":[{"role":"user","content":"x"}]} trailing',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=[repr(body[:60]) for body in BAD_BODIES])
async def test_bad_bodies(client, body):
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        await assert_refused(client, path, body)
    assert (await client.chat()).status == 200


async def test_half_a_surrogate_is_named(client):
    reply = await client.post("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a\\ud800b"}]}')
    assert reply.error["code"] == "invalid_unicode"
    assert "\\ud800" in reply.error["message"]
    whole = b'{"messages":[{"role":"user","content":"\\ud83d\\udd25 \\\\ud800"}]}'
    assert (await client.post("/v1/chat/completions", whole)).status == 200


async def test_others_stream_on_while_bad_requests_come(make_client):
    async with make_client(forever, step_s=0.001) as client:
        stream = client.start("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 200})
        for body in BAD_BODIES:
            await client.post("/v1/chat/completions", body)
        for fields, _ in BAD_CHAT:
            assert (
                await client.chat(**fields)
                if "messages" not in fields
                else await client.post("/v1/chat/completions", fields)
            ).status == 400
        await asyncio.wait_for(stream.task, 10)
        text = "".join(event["choices"][0]["text"] for event in stream.reply.events[:-1])
        assert text == "x" * 200
        await client.quiet()


async def test_a_body_over_the_limit(make_client):
    async with make_client(config=ServerConfig(max_body_bytes=1000)) as client:
        await assert_refused(client, "/v1/completions", {"prompt": "x" * 2000}, None, 413)
        declared = await client.post("/v1/completions", b"{}", headers={"content-length": "99999999999"})
        assert (declared.status, declared.headers["connection"]) == (413, "close")


@pytest.mark.parametrize("kind", ["chat", "completion", "escaped", "ids", "tokenize"])
async def test_a_5_mb_prompt_is_refused_while_health_answers(make_client, kind):
    size = 5_000_000
    bodies = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * size}]}),
        "completion": ("/v1/completions", {"prompt": "x " * (size // 2)}),
        "escaped": ("/v1/completions", {"prompt": "é" * (size // 6)}),
        "ids": ("/v1/completions", {"prompt": [1] * (size // 3)}),
        "tokenize": ("/tokenize", {"prompt": "x" * size}),
    }
    path, fields = bodies[kind]
    raw = json.dumps(fields).encode()
    async with make_client() as client:
        began = time.perf_counter()
        big = client.start(path, raw)
        slowest = 0.0
        while not big.task.done():
            asked = time.perf_counter()
            assert (await client.get("/health")).status == 200
            slowest = max(slowest, time.perf_counter() - asked)
            await asyncio.sleep(0.01)
        assert big.reply.status == 400
        assert big.reply.error["code"] == "context_length_exceeded"
        assert slowest < 0.2
        assert time.perf_counter() - began < 2


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__), JSON_VALUES, max_size=4)


async def test_no_value_of_any_field_is_a_server_error(make_client):
    async with make_client() as client:
        loop = asyncio.get_running_loop()

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(FIELDS)
        def check(fields):
            body = {"messages": MESSAGES, **fields}
            reply = asyncio.run_coroutine_threadsafe(client.post("/v1/chat/completions", body), loop).result(10)
            assert reply.status in (200, 400, 404, 504), reply.body

        await asyncio.to_thread(check)
        await client.quiet()


LONG = "y" * 300_000


@pytest.mark.parametrize(
    "fields",
    [
        {LONG: 1},
        {"model": LONG},
        {"logit_bias": {LONG: 1}},
        {"logit_bias": {"1": LONG}},
        {"stream_options": {LONG: 1}},
        {"chat_template_kwargs": {"messages": LONG}},
        {"tool_choice": LONG},
        {"messages": [{"role": LONG, "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi", LONG: LONG}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
async def test_an_error_does_not_send_back_all_that_it_quotes(client, fields):
    reply = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert 400 <= reply.status < 500
    assert len(reply.body) < 2000
    assert reply.error["message"]
