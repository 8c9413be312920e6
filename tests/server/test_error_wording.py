"""What is wrong with a request is told in plain words, and where to go instead."""

from __future__ import annotations

import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": "hi"}, "messages", "messages must be an array, got a string"),
        ({"messages": ["hi"]}, "messages[0]", "messages[0] must be an object, got a string"),
        ({**OK, "n": "2"}, "n", "n must be a number, got a string"),
        ({**OK, "stop": 3}, "stop", "stop must be a string or an array, got a number"),
        ({**OK, "stop": [{}]}, "stop[0]", "stop[0] must be a string, got an object"),
        ({**OK, "stream": 1.5}, "stream", "stream must be a boolean, got a number"),
        ({**OK, "user": True}, "user", "user must be a string, got a boolean"),
        ({**OK, "stop_token_ids": [None]}, "stop_token_ids[0]", "stop_token_ids[0] must be a number, got null"),
        ({**OK, "logit_bias": {"1": "x"}}, "logit_bias", "a value of logit_bias must be a number, got a string"),
        ({**OK, "stream_options": []}, "stream_options", "stream_options must be an object, got an array"),
        (["hi"], None, "the body must be an object, got an array"),
        (b'{"n": 1e999}', "n", "n is not accepted: number out of range"),
    ],
)
async def test_a_wrong_type(client, body, param, message):
    reply = await client.post(CHAT, body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_type")
    assert (reply.error["param"], reply.error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"prompt": "hi"}, "/v1/chat/completions takes messages; it is /v1/completions that takes prompt"),
        (COMPLETION, OK, "/v1/completions takes prompt; it is /v1/chat/completions that takes messages"),
        (CHAT, {**OK, "nonsense": 1}, "it is not supported; leave it out"),
    ],
)
async def test_a_field_of_the_other_route(client, path, body, message):
    reply = await client.post(path, body)
    name = next(reversed(body))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unknown_parameter", name)
    assert reply.error["message"] == f"unknown field {name!r}: {message}"


async def test_a_field_inside_another_is_not_mistaken_for_one_of_the_other_route(client):
    reply = await client.post(CHAT, {**OK, "stream": True, "stream_options": {"prompt": 1}})
    assert reply.error["message"] == "unknown field 'stream_options.prompt': it is not supported; leave it out"
