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
        (CHAT, {**OK, "max_token": 1}, "it is not supported; leave it out; did you mean max_tokens?"),
        (CHAT, {**OK, "max_tokens" * 8: 1}, "it is not supported; leave it out"),
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


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED = {**OK, "max_tokens": 8}
FORMAT = {"type": "json_schema", "name": "a b", "schema": {}}


@pytest.mark.parametrize(
    ("path", "body", "param", "begins"),
    [
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be 1 or more"),
        (
            RESPONSES,
            {"input": "a", "max_output_tokens": -1},
            "max_output_tokens",
            "max_output_tokens must be 1 or more",
        ),
        (RESPONSES, {"input": "a", "text": {"format": FORMAT}}, "text.format.name", "text.format.name must be"),
        ("/v1/embeddings", {"input": [256 * 256]}, "input", "input: token id 65536"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "input[1]: the prompt is empty"),
        (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]", "prompt[1]: the prompt is empty"),
    ],
)
async def test_a_field_has_its_name_of_this_route(client, path, body, param, begins):
    reply = await client.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["message"].startswith(begins)


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 or more, got 0"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "zzz"}}}}, "output_config.format: "),
        ({"top_k": -5}, "top_k"),
    ],
)
async def test_where_errors_have_no_place_for_the_field_the_message_names_it(client, more, begins):
    reply = await client.post(MESSAGES, {**ASKED, **more})
    assert reply.status == 400
    assert reply.error["message"].startswith(begins)
