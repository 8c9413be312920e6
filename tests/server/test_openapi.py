"""The server's OpenAPI document: complete, true of what the server answers, and of what it refuses."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
import requests
from benchmarks.openapi_check import WITHOUT_END, check
from schemathesis.core.transport import Response
from schemathesis.openapi import from_dict

from firsttoken.server.config import ServerConfig
from firsttoken.server.openapi.document import document
from firsttoken.server.openapi.operations import OPERATIONS
from firsttoken.server.openapi.structs import Described
from firsttoken.server.refusals import refused_fields
from tests.server.conftest import forever

MESSAGES = [{"role": "user", "content": "hi"}]
KEY = {"authorization": "Bearer secret"}
# The least that each route takes, of those that take a body.
LEAST = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
}
PROBABILITIES = {
    "/v1/chat/completions": {"logprobs": True},
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
}
BY_PATH = {one.path: one for one in reversed(OPERATIONS)}


async def test_every_route_of_the_application_is_described_and_no_other(client):
    described = {(one.method, one.path) for one in OPERATIONS}
    assert {route for route in client.app.routes if route[0] != "HEAD"} == described


def test_every_field_that_is_honoured_is_described_and_no_other():
    schemas = document()["components"]["schemas"]
    for struct in {one.takes for one in OPERATIONS if one.takes is not None}:
        properties = schemas[struct.__name__]["properties"]
        assert set(properties) == set(struct.__struct_encode_fields__) - set(refused_fields(struct))
        for name, schema in properties.items():
            assert schema["description"], name
            assert {"type", "anyOf", "$ref", "oneOf", "enum"} & set(schema), f"{name} could be anything"


async def test_it_is_answered_and_is_openapi(client):
    reply = await client.get("/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == json.loads(json.dumps(document()))
    schema = from_dict(reply.json)
    schema.validate()
    assert schema.specification.version == "3.1.0"
    assert "security" not in reply.json


async def test_with_keys_it_says_which_routes_need_one(make_client):
    async with make_client(config=ServerConfig(api_keys=("secret",))) as client:
        assert (await client.get("/openapi.json")).status == 401
        found = (await client.get("/openapi.json", headers=KEY)).json
        assert found["security"] == [{"key": []}]
        for path, methods in found["paths"].items():
            for method, told in methods.items():
                if path == "/dashboard/live":
                    continue  # it would not end
                reply = await client.post(path.format(name="x", id="x"), method=method.upper())
                assert (reply.status == 401) == ("security" not in told) == ("401" in told["responses"]), path


def answer_of(path: str, raw: bytes):
    """Decodes strictly: a key that is not described is an error, and so is a missing one."""
    return msgspec.json.decode(raw, type=BY_PATH[path].answer)


ASKED = {
    "/v1/chat/completions": [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "timings": True},
        {"stop": "lo", "service_tier": "flex"},
    ],
    "/v1/completions": [
        {},
        {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "return_token_ids": True, "timings": True},
        {"prompt": [104, 105], "echo": True, "max_tokens": 2},
    ],
    "/v1/responses": [
        {},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "timings": True},
        {"max_output_tokens": 3, "metadata": {"a": "b"}, "instructions": "be kind"},
    ],
    "/v1/messages": [{}, {"max_tokens": 3, "timings": True}, {"stop_sequences": ["lo"]}],
    "/v1/messages/count_tokens": [{}, {"system": "be kind"}],
    "/tokenize": [{}, {"return_token_strs": True}],
    "/detokenize": [{}, {"tokens": [0xF0, 0x9F]}],
}


@pytest.mark.parametrize("path", ASKED)
async def test_answers_are_as_described(client, path):
    for fields in ASKED[path]:
        body = {**LEAST[path], **fields}
        whole = await client.post(path, body)
        assert whole.status == 200, whole.body
        answer_of(path, whole.body)
        event = BY_PATH[path].event
        if event is None:
            continue
        if path in ("/v1/responses", "/v1/messages"):
            for _, one in (await client.post(path, {**body, "stream": True})).named_events:
                msgspec.convert(one, event)
            continue
        for options in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
            stream = await client.post(path, {**body, "stream": True, "stream_options": options})
            for one in stream.events[:-1]:
                msgspec.convert(one, event)


async def test_what_the_server_says_of_itself_is_as_described(make_client):
    async with make_client(forever, step_s=0.002) as client:
        await client.chat(max_tokens=3)
        call = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 500, "stream": True})
        await call.first_byte.wait()
        kept = (await client.post("/v1/responses", {"input": "hi", "max_output_tokens": 3})).json["id"]
        for one in OPERATIONS:
            if one.method != "GET" or isinstance(one.answer, str):
                continue
            # Its response's id is a request's name, too.
            reply = await client.get(one.path.format(name="stub", id=kept))
            assert reply.status == 200, one.path
            answer_of(one.path, reply.body)
        call.leave()
        await call.task


def beside(schema: dict) -> list[object]:
    """Values just outside of the bounds of a property."""
    found: list[object] = []
    if "minimum" in schema:
        found.append(schema["minimum"] - 1)
    if "maximum" in schema:
        found.append(schema["maximum"] * 2 + 1)
    if "exclusiveMinimum" in schema:
        found.append(schema["exclusiveMinimum"])
    if "minLength" in schema:
        found.append("")
    if "maxLength" in schema:
        found.append("x" * (schema["maxLength"] + 1))
    if "maxItems" in schema:
        found.append(["x"] * (schema["maxItems"] + 1))
    if "enum" in schema:
        found.append("none of these")
    return found


def within(schema: dict) -> list[object]:
    """The outermost values that a property takes."""
    found = [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
    return found + [one for one in schema.get("enum", ()) if one is not None]


@pytest.mark.parametrize("path", LEAST)
async def test_what_lies_outside_of_a_bound_is_refused(client, path):
    properties = document()["components"]["schemas"][BY_PATH[path].takes.__name__]["properties"]
    for name, schema in properties.items():
        least = {**LEAST[path], **(PROBABILITIES[path] if name == "top_logprobs" else {})}
        for value in beside(schema):
            reply = await client.post(path, {**least, name: value})
            assert reply.status == 400, (name, value)
            if "param" in reply.error:
                assert reply.error["param"].partition("[")[0] == name, value
            else:
                assert name in reply.error["message"], value
        if name in ("min_tokens", "reasoning_effort"):
            continue  # the most it may be depends on the model and the prompt
        for value in within(schema):
            reply = await client.post(path, {**least, name: value})
            assert reply.status == 200, (name, value, reply.body)


async def test_schemathesis_finds_nothing(make_client, serve_http):
    """A few requests for each route, the same in each run. For more there is benchmarks/openapi_check.py."""
    async with make_client() as client, serve_http(client.app) as url:
        found = await asyncio.to_thread(lambda: dict(check(url, document(), 2, vary=False)))
        await client.quiet()
    assert len(found) == len(OPERATIONS) - len(WITHOUT_END)
    assert any(statuses[200] for route, statuses in found.items() if route.startswith("POST")), "none was answered"


async def test_a_record_of_a_request_is_as_it_is_described(client):
    """By a reader that knows older dialects of schemas: "prefixItems" is something else to it."""
    reply = await client.post("/v1/completions", LEAST["/v1/completions"])
    record = await client.get(f"/v1/requests/{reply.json['id']}")
    operation = from_dict(document())["/v1/requests/{id}"]["GET"]
    request = requests.Request("GET", "http://x/").prepare()
    headers = {"content-type": ["application/json"]}
    operation.validate_response(Response(200, headers, record.body, request, 0.1, True))
    assert record.json["timeline"]


def test_a_field_without_words_is_an_error():
    class Forgotten(msgspec.Struct):
        never_described: int | None = None

    class Unknown(msgspec.Struct):
        unknown: msgspec.Raw = msgspec.Raw()

    with pytest.raises(LookupError, match=r"Forgotten.never_described is not described"):
        Described().struct(Forgotten)
    with pytest.raises(LookupError, match=r"Unknown.unknown is kept raw"):
        Described().struct(Unknown)
