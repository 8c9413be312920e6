"""A body is refused by how many values it has, before they are made into objects."""

from __future__ import annotations

import json
import time

import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import MAX_STOP_CHARS, SamplingParams
from firsttoken.server.body_values import MAX_ITEMS, MAX_NESTED, check_values
from firsttoken.server.errors import ApiError

HI = b'{"messages":[{"role":"user","content":"hi"}],'
MANY = MAX_NESTED + 1


@pytest.mark.parametrize(
    "more",
    [
        b'"chat_template_kwargs":{"a":[' + b"[]," * MANY + b"[]]}}",
        b'"metadata":{"a":[' + b'{"":0},' * MANY + b"0]}}",
        b'"stop":[' + b'"a",' * MAX_ITEMS + b'"a","a"]}',
        b'"stop_token_ids":[' + b"1," * (MAX_ITEMS + 1) + b"1]}",
    ],
    ids=["lists", "objects", "texts", "numbers"],
)
async def test_what_has_too_many_values_is_refused_at_once(client, more: bytes) -> None:
    began = time.monotonic()
    reply = await client.post("/v1/chat/completions", HI + more)
    assert (reply.status, reply.error["code"]) == (400, "too_many_values")
    assert time.monotonic() - began < 1  # a tenth of it here; to decode 22 MB of these took ten seconds


async def test_a_prompt_of_too_many_ids_is_refused_as_too_long(client) -> None:
    reply = await client.post("/v1/completions", b'{"prompt":[' + b"1," * 2_000_000 + b"1]}")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", "prompt")


def test_texts_may_have_any_number_of_commas_and_brackets() -> None:
    text = "[1,2],{" * MANY + 'a "quoted" \\ word \\'
    check_values(json.dumps({"prompt": text, "n": 1}).encode())
    check_values(b'{"prompt":[' + b"1," * 500_000 + b"1]}", "prompt")
    check_values(b"[" * 1000)
    with pytest.raises(ApiError):
        check_values(json.dumps({"a": text, "b": [[]] * MANY}).encode())


async def test_a_body_larger_than_any_request_of_the_model_is_not_read(client) -> None:
    reply = await client.post("/v1/chat/completions", HI + b'"user":"' + b"x" * (10 << 20) + b'"}')
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_stop_strings_have_a_length() -> None:
    SamplingParams(stop="x" * MAX_STOP_CHARS)
    with pytest.raises(InvalidRequest, match="1024 characters") as caught:
        SamplingParams(stop=["a", "x" * (MAX_STOP_CHARS + 1)])
    assert caught.value.param == "stop"
