"""What callers send, and what a whole answer must hold."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from firsttoken.core.cache_hint import CacheHint
from firsttoken.server.openapi.operations import OPERATIONS
from firsttoken.server.schema import StreamOptions
from tests.server.conftest import END, forever
from tests.server.test_openapi import BY_PATH, LEAST

MESSAGES = [{"role": "user", "content": "hi"}]
# The least that each route takes, of all that take a body.
ROUTES = {
    **LEAST,
    "/v1/embeddings": {"input": "test"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_bb01_null_is_the_same_as_left_out(client, path):
    """Of every field there is, also of those that are refused."""
    body = {**ROUTES[path], **({"temperature": 0} if "temperature" in BY_PATH[path].takes.__struct_fields__ else {})}
    plain = (await client.post(path, body)).json
    for name in BY_PATH[path].takes.__struct_encode_fields__:
        if name in ROUTES[path]:
            continue
        null = await client.post(path, {**body, name: None})
        assert null.status == 200, (name, null.body)
        for part in ("choices", "content", "data", "results", "tokens"):
            assert null.json.get(part) == plain.get(part), name
        if name != "temperature":
            assert null.json.get("usage") == plain.get("usage")


async def test_bb01_so_is_null_in_nested_objects(client):
    for outer, struct in (("stream_options", StreamOptions), ("cache_hint", CacheHint)):
        body = {"prompt": "test", "stream": True, outer: dict.fromkeys(struct.__struct_fields__)}
        reply = await client.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        assert reply.events[-1] == "[DONE]"


def uneven(request):
    """Answers of lengths that differ from child to child."""
    return [*b"a" * random.Random(request.id).randint(1, 31), END]


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_bb03_all_answers_of_n_come_though_they_end_apart(make_client, tokens_per_step):
    async with make_client(uneven, tokens_per_step=tokens_per_step) as client:
        asked = {"prompt": "1 2 3", "n": 8, "temperature": 1.0, "max_tokens": 32}
        for reply in await asyncio.gather(*(client.post("/v1/completions", asked) for _ in range(10))):
            choices = reply.json["choices"]
            assert [choice["index"] for choice in choices] == list(range(8))
            assert all(choice["text"] and choice["finish_reason"] == "stop" for choice in choices)
            assert len({len(choice["text"]) for choice in choices}) > 1
            tokens = sum(len(choice["text"]) + 1 for choice in choices)  # and the end token of each
            assert reply.json["usage"]["completion_tokens"] == tokens
        for path, body in (("/v1/completions", asked), ("/v1/chat/completions", {"messages": MESSAGES, "n": 8})):
            stream = await client.post(path, {**body, "stream": True})
            ends = [one["index"] for event in stream.events[:-1] for one in event["choices"] if one["finish_reason"]]
            assert sorted(ends) == list(range(8))


async def test_bb17_a_probability_of_zero_is_a_number_in_json(real):
    """All tokens but one are forbidden, and their log-probabilities are asked for."""
    vocabulary = real.llm.info.vocab_size
    bias = {str(token): -100 for token in range(vocabulary) if token != 65}
    for path, asked in (
        ("/v1/completions", {"logprobs": 5, "prompt": [1, 2, 3]}),
        ("/v1/completions", {"logprobs": 20, "prompt": [1, 2, 3], "top_k": 1, "min_p": 1}),
    ):
        for stream in (False, True):
            reply = await real.post(path, {**asked, "logit_bias": bias, "max_tokens": 3, "stream": stream})
            assert reply.status == 200, reply.body
            events = reply.events[:-1] if stream else [reply.json]  # which fail at NaN and Infinity
            tops = [top for one in events for top in one["choices"][0]["logprobs"]["top_logprobs"]]
            assert tops
            assert all(-9999 <= value <= 0 for top in tops for value in top.values())


PAST_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "said",
    [
        {"content": ""},
        {"content": None},
        {},
        {"content": []},
        {"content": None, "tool_calls": [PAST_CALL]},
        {"content": [], "tool_calls": [PAST_CALL]},
        {"content": "", "tool_calls": [PAST_CALL], "refusal": None, "annotations": [], "audio": None},
        {"content": [{"type": "text", "text": ""}]},
    ],
    ids=repr,
)
async def test_bb24_an_assistant_who_said_nothing_is_accepted(client, said):
    first, last = {"role": "user", "content": "A"}, {"role": "user", "content": "B"}
    between = [{"role": "assistant", **said}]
    if "tool_calls" in said:
        between.append({"role": "tool", "tool_call_id": "c1", "content": "ok"})
    reply = await client.post("/v1/chat/completions", {"messages": [first, *between, last]})
    assert reply.status == 200, reply.body
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}]}, *between, last]
    assert (await client.post("/v1/chat/completions", {"messages": parts})).json["usage"] == reply.json["usage"]


BAD_IDS = [
    ({"logit_bias": {"99999999": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {" 1": 1}}, "logit_bias"),
    ({"logit_bias": {"7": -1000, "07": 1}}, "logit_bias"),
    ({"logit_bias": {"18446744073709551617": 1}}, "logit_bias"),
    ({"prompt": [99999999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**32]}, "prompt"),
    ({"prompt": [[1], [99999999]]}, "prompt[1]"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
]


async def test_bb55_ids_that_no_model_has_are_refused_while_others_go_on(make_client):
    async with make_client(forever, step_s=0.001) as client:
        stream = client.start("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 100})
        await stream.first_byte.wait()
        for fields, param in BAD_IDS:
            reply = await client.post("/v1/completions", {"prompt": "hi", **fields})
            assert reply.status == 400, fields
            assert reply.error["param"].startswith(param), (fields, reply.error)
        for tokens in ([99999999], [-1]):
            assert (await client.post("/detokenize", {"tokens": tokens})).status == 400
        await stream.task
        assert "".join(event["choices"][0]["text"] for event in stream.reply.events[:-1]) == "x" * 100
        await client.quiet()


@pytest.mark.parametrize("id_", ["same", "x" * (1 << 20), "a\r\nset-cookie: b", "\x00\x1b[31m", "é" * 300, " "])
async def test_bb56_a_callers_id_harms_nobody(make_client, id_):
    """Two that run at once under one id, and what it says is never sent back as it is where it is odd."""
    scripts = {}

    def own(request):
        return [*str(scripts.setdefault(request.id, len(scripts))).encode() * 5, END]

    async with make_client(own, step_s=0.001) as client:
        header = {"x-request-id": id_}
        both = await asyncio.gather(
            *(client.post("/v1/completions", {"prompt": "hi", "stream": True}, headers=header) for _ in range(2))
        )
        texts = {"".join(event["choices"][0]["text"] for event in reply.events[:-1]) for reply in both}
        assert texts == {"00000", "11111"}
        for reply in both:
            told = reply.headers["x-request-id"]
            assert 0 < len(told) <= 128
            assert told.isascii()
            assert told.isprintable()
            assert max(len(json.dumps(event)) for event in reply.events) < 1000
        await client.quiet()
        metrics = (await client.get("/metrics")).body.decode()
        gauges = [line for line in metrics.splitlines() if "running" in line or "waiting" in line]
        assert not [line for line in gauges if not line.startswith("#") and float(line.split()[-1]) < 0]


def test_every_route_that_takes_a_body_was_asked():
    """Those of two names once."""
    takes = {one.takes for one in OPERATIONS if one.takes is not None}
    assert {BY_PATH[path].takes for path in ROUTES} == takes


WORDS = "".join(chr(97 + number * 7 % 26) for number in range(400))


async def test_bb04_all_of_a_text_counts_for_its_vector_or_it_is_refused(real):
    """Two texts that differ behind their first 400 tokens."""
    first, other = WORDS + "and so on", WORDS + "or not"
    replies = [await real.post("/v1/embeddings", {"input": text}) for text in (first, other, WORDS)]
    assert [reply.json["usage"]["prompt_tokens"] for reply in replies] == [len(first), len(other), len(WORDS)]
    vectors = [reply.json["data"][0]["embedding"] for reply in replies]
    assert len({tuple(vector) for vector in vectors}) == 3
    limit = real.llm.info.max_model_len
    for path, body in (
        ("/v1/embeddings", {"input": "x" * (limit + 1)}),
        ("/v1/score", {"text_1": "a", "text_2": "x" * (limit + 1)}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "x" * (limit + 1)]}),
    ):
        refused = await real.post(path, body)
        assert refused.status == 400, path
        assert str(limit) in refused.error["message"]
    cut = await real.post("/v1/embeddings", {"input": "x" * (limit + 1), "truncate_prompt_tokens": 100})
    assert cut.json["usage"]["prompt_tokens"] == 100
