"""Long answers are kept small until they are told, and are made while they are written."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace

import pytest

from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend.answer import Delta
from firsttoken.server.chat_answers import Message
from firsttoken.server.conversation import Said
from firsttoken.server.encode import TokenNames, in_pieces, to_json
from firsttoken.server.kept_logprobs import KeptLogprobs
from firsttoken.text.pieces import Content
from tests.server.conftest import forever

TOKENS = 300


def found(token: int, count: int = 20) -> TokenLogprobs:
    return TokenLogprobs(-token / 7, token, [token + one for one in range(count)], [-one / 3 for one in range(count)])


def test_an_iterator_stands_for_a_list():
    body = {"a": iter([1, {"b": "\0"}]), "none": iter(()), "c": [iter("xy"), "z"]}
    assert json.loads(b"".join(in_pieces(body))) == {"a": [1, {"b": "\0"}], "none": [], "c": [["x", "y"], "z"]}
    assert list(in_pieces({"a": "\0", "b": None})) == [to_json({"a": "\0", "b": None})]
    with pytest.raises(TypeError, match="object is nothing"):
        list(in_pieces({"a": object()}))


def test_kept_log_probabilities_come_back_as_they_were():
    kept = KeptLogprobs(top=3)
    kept.add([(5, found(5, 0)), (6, found(6, 3))])
    kept.add([(7, found(7, 5))])
    assert list(kept) == list(kept) == [(5, found(5, 0)), (6, found(6, 3)), (7, found(7, 3))]
    assert len(kept) == 3


def test_a_long_answer_with_log_probabilities_takes_a_few_hundred_bytes_a_token():
    params = SamplingParams(logprobs=20)
    tracemalloc.start()
    try:
        message = Message(0, SimpleNamespace(params=params), TokenNames(None), token_ids=True)
        for token in range(TOKENS):
            finish = "length" if token == TOKENS - 1 else None
            delta = Delta(0, "x" * 4, [token], [found(token)], finish, None)
            message.add(Said(delta, [Content(delta.text)], finish))
        held = tracemalloc.get_traced_memory()[0]
        written = sum(len(piece) for piece in in_pieces(message.choice()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 400 * TOKENS  # and not 7000
    assert written > 2000 * TOKENS
    assert peak < held + 150 * TOKENS  # of which the token ids are most


async def test_a_long_answer_comes_whole(make_client):
    async with make_client(forever, step_s=0) as client:
        fields = {"max_tokens": 1000, "logprobs": 20, "return_token_ids": True}
        reply = await client.complete("ab", **fields)
        assert "content-length" not in reply.headers
        assert len(reply.chunks) > 2
        [choice] = reply.json["choices"]
        assert {name: len(values) for name, values in choice["logprobs"].items()} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 1000
        )
        assert choice["logprobs"]["text_offset"] == list(range(1000))
        assert choice["token_ids"] == [ord("x")] * 1000
        chat = await client.chat("ab", max_tokens=1000, logprobs=True, top_logprobs=20)
        assert len(chat.json["choices"][0]["logprobs"]["content"]) == 1000
        plain = await client.complete("ab", max_tokens=3000)
        assert int(plain.headers["content-length"]) == len(plain.body) > 3000


async def test_a_long_response_comes_whole(make_client):
    async with make_client(forever, step_s=0) as client:
        fields = {"input": "ab", "max_output_tokens": 1000, "include": ["message.output_text.logprobs"]}
        for kept in (False, True):
            reply = await client.post("/v1/responses", {**fields, "top_logprobs": 5, "store": kept})
            assert ("content-length" in reply.headers) is kept
            assert len(reply.json["output"][0]["content"][0]["logprobs"]) == 1000
        again = await client.get(f"/v1/responses/{reply.json['id']}")
        assert again.json == reply.json
        streamed = await client.post("/v1/responses", {**fields, "top_logprobs": 5, "stream": True})
        ends = dict(streamed.named_events)
        told = ends["response.completed" if "response.completed" in ends else "response.incomplete"]["response"]
        for item in (told["output"][0], ends["response.output_item.done"]["item"]):
            assert item["content"][0]["logprobs"] == ends["response.output_text.done"]["logprobs"]
            assert len(item["content"][0]["logprobs"]) == 1000
