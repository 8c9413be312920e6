"""Log-probabilities of prompts, prompts cut to their last tokens, and what else vLLM's callers send."""

from __future__ import annotations

import openai
import pytest

from firsttoken.server.config import ServerConfig
from tests.server.conftest import END, say

PLAIN = {"add_special_tokens": False}


async def test_prompt_logprobs_are_told_for_each_token_but_the_first(client):
    for fields in ({"max_tokens": 0}, {"max_tokens": 3}):
        choice = (await client.complete("abc", prompt_logprobs=2, **fields, **PLAIN)).json["choices"][0]
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert second == {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        }
        assert third["99"]["decoded_token"] == "c"
    alone = (await client.complete("a", prompt_logprobs=0, max_tokens=0, **PLAIN)).json
    assert (alone["choices"][0]["text"], alone["choices"][0]["prompt_logprobs"]) == ("", [None])
    assert alone["choices"][0]["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0


async def test_chat_tells_them_beside_its_choices(client):
    body = (await client.chat("ab", prompt_logprobs=1, return_token_ids=True)).json
    told, ids = body["prompt_logprobs"], body["prompt_token_ids"]
    assert [None if one is None else list(one) for one in told] == [None, *([str(token)] for token in ids[1:])]
    assert "prompt_logprobs" not in (await client.chat("ab")).json


async def test_an_echo_with_logprobs_begins_with_those_of_the_prompt(client):
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, **PLAIN}
    scored = (await client.complete(max_tokens=0, **fields)).json["choices"][0]
    assert scored["text"] == "ab"
    assert scored["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    whole = (await client.complete(max_tokens=2, **fields)).json["choices"][0]
    assert whole["text"] == "abHe"
    assert whole["logprobs"]["tokens"] == ["a", "b", "H", "e"]
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3]
    streamed = (await client.complete(max_tokens=2, stream=True, **fields)).events[:-1]
    lists = [event["choices"][0]["logprobs"] for event in streamed if event["choices"][0]["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for part in lists for value in part[name]] == values


async def test_every_prompt_and_answer_has_its_own(make_client):
    async with make_client(say("xyz")) as client:
        fields = {"echo": True, "logprobs": 0, "n": 2, "max_tokens": 1, **PLAIN}
        choices = (await client.complete(["ab", [99, 100, 101]], **fields)).json["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b", "x"]] * 2 + [["c", "d", "e", "x"]] * 2


async def test_a_prompt_may_be_cut_to_its_last_tokens(make_client):
    async with make_client(max_model_len=64) as client:
        text = "x" * 100 + "abc"
        fields = {"return_token_ids": True, **PLAIN}
        for keep, max_tokens, kept in ((3, 2, 3), (-1, 4, 60), (-1, None, 48), (-1, 1000, 1)):
            limit = {} if max_tokens is None else {"max_tokens": max_tokens}
            reply = await client.complete(text, truncate_prompt_tokens=keep, **limit, **fields)
            assert reply.json["usage"]["prompt_tokens"] == kept, reply.body
            assert bytes(reply.json["choices"][0]["prompt_token_ids"]).decode() == text[-kept:]
        echoed = await client.complete(text, truncate_prompt_tokens=3, echo=True, max_tokens=1, **PLAIN)
        assert echoed.json["choices"][0]["text"] == "abcH"
        chat = await client.chat("y" * 200, truncate_prompt_tokens=5, return_token_ids=True)
        assert len(chat.json["prompt_token_ids"]) == chat.json["usage"]["prompt_tokens"] == 5
        late = await client.complete(text)
        assert (late.status, late.error["code"]) == (400, "context_length_exceeded")


async def test_tokens_may_be_named_by_their_ids(client):
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    lists = (await client.complete("hi", logprobs=1, **fields)).json["choices"][0]["logprobs"]
    assert lists["tokens"] == ["token_id:72"]
    assert lists["top_logprobs"] == [{"token_id:72": -0.5}]
    entry = (await client.chat(logprobs=True, **fields)).json["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:72", list(b"token_id:72"))


async def test_a_request_may_bring_its_id_in_the_body(client):
    reply = await client.complete(request_id="mine-1")
    assert reply.headers["x-request-id"] == "mine-1"
    assert (await client.get("/v1/requests/mine-1")).json["route"] == "/v1/completions"
    assert (await client.chat(request_id="mine-2")).headers["x-request-id"] == "mine-2"
    body, header = {"prompt": "a", "request_id": "one"}, {"X-Request-Id": "other"}
    assert (await client.post("/v1/completions", body, headers=header)).error["param"] == "request_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4096}, "truncate_prompt_tokens"),
        ({"request_id": "a/b c"}, "request_id"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client, fields, param):
    reply = await client.complete("ab", **fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


async def test_as_many_as_are_told_may_be_called_best(client):
    assert len((await client.complete("ab", n=2, best_of=2)).json["choices"]) == 2


async def test_log_probabilities_of_a_prompt_count_as_cost(make_client):
    async with make_client(config=ServerConfig(max_request_cost=1000)) as client:
        assert (await client.complete("a" * 100, max_tokens=0, echo=True)).status == 200
        reply = await client.complete("a" * 100, max_tokens=0, prompt_logprobs=5)
        assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")


async def test_bad_words_and_allowed_tokens_reach_the_engine(make_client):
    seen = []
    async with make_client(lambda request: seen.append(request.params) or [END]) as client:
        fields = {"bad_words": ["no"], "allowed_token_ids": [65, 66]}
        assert (await client.complete(**fields)).status == 200
        assert (await client.chat(**fields)).status == 200
        assert (await client.complete(bad_words=[])).status == 200
        refused = await client.complete(allowed_token_ids=[65], bad_words=["A"])
        assert (refused.status, refused.error["param"]) == (400, "allowed_token_ids")
    for params in seen[:2]:
        assert params.bad_words_token_ids == (tuple(b"no"), tuple(b" no"))
        assert params.allowed_token_ids == (65, 66)
    assert seen[2].bad_words_token_ids is None


async def test_openais_client_scores_a_prompt(client, serve_http):
    async with serve_http(client.app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as caller:
        scored = await caller.completions.create(
            model="stub", prompt="ab", echo=True, logprobs=1, max_tokens=0, extra_body=PLAIN
        )
    [choice] = scored.choices
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs.token_logprobs == [None, -0.5]
