"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank`` on the scripted engine, and by OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array

import openai
import pytest

from firsttoken.core.pooling import Pooling
from firsttoken.server.config import ServerConfig

EMBED = "/v1/embeddings"


def residues(text: str, kind: str = "last") -> list[float]:
    """What the scripted engine pools of a text: counts of token ids modulo 8, of length 1."""
    tokens = text.encode() if kind == "mean" else text.encode()[-1:]
    counts = [sum(token % 8 == residue for token in tokens) for residue in range(8)]
    length = math.hypot(*counts)
    return [count / length for count in counts]


async def test_each_form_of_input_gives_its_vectors_in_order(client):
    for given, texts in (
        ("hi", ["hi"]),
        (list(b"hi"), ["hi"]),
        (["a", "bc", "d"], ["a", "bc", "d"]),
        ([list(b"xy"), list(b"z")], ["xy", "z"]),
    ):
        reply = await client.post(EMBED, {"input": given, "model": "stub", "add_special_tokens": False})
        assert reply.status == 200, reply.body
        body = reply.json
        assert (body["object"], body["model"]) == ("list", "stub")
        assert [one["index"] for one in body["data"]] == list(range(len(texts)))
        for one, text in zip(body["data"], texts, strict=True):
            assert one["embedding"] == pytest.approx(residues(text))
        tokens = sum(map(len, texts))
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_a_model_may_take_the_mean_and_leave_lengths_alone(client):
    client.llm._text = client.llm._text.__class__(
        "stub", client.llm.tokenizer, pooling=Pooling("mean", normalize=False)
    )
    reply = await client.post(EMBED, {"input": "abab", "add_special_tokens": False})
    assert reply.json["data"][0]["embedding"] == [0, 0.5, 0.5, 0, 0, 0, 0, 0]
    reply = await client.post(EMBED, {"input": "abab", "add_special_tokens": False, "normalize": True})
    assert reply.json["data"][0]["embedding"] == pytest.approx(residues("ab", "mean"))


async def test_dimensions_cut_and_bring_to_length_one_again(client):
    client.llm._text = client.llm._text.__class__("stub", client.llm.tokenizer, pooling=Pooling("mean"))
    reply = await client.post(EMBED, {"input": "aabbb", "dimensions": 2, "add_special_tokens": False})
    assert reply.json["data"][0]["embedding"] == [0, 1]
    reply = await client.post(EMBED, {"input": "aabbb", "dimensions": 3, "encoding_format": "base64"})
    numbers = array("f", base64.b64decode(reply.json["data"][0]["embedding"]))
    assert math.hypot(*numbers) == pytest.approx(1)
    assert len(numbers) == 3


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1, 9999999]]}, "input", "vocabulary"),
        ({"input": 5}, "input", "text or a list"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64"),
        ({"input": "a", "dimensions": 9}, "dimensions", "[1, 8]"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1 or more"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or in [1, 4096]"),
        ({"input": "a", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens", "4096"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "send each text as input"),
        ({"input": "a", "prompt": "a"}, "prompt", "takes input"),
        ({"input": "a", "embed_dtype": "bfloat16"}, "embed_dtype", "float32"),
        ({"input": "a", "request_id": "a b"}, "request_id", "letters"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(client, fields, param, said):
    reply = await client.post(EMBED, fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert said in reply.error["message"]


async def test_a_text_over_the_limit_is_refused_with_the_limit_and_cut_only_when_asked(make_client):
    async with make_client(max_model_len=64) as client:
        text = "x" * 60 + "abcdefgh"
        reply = await client.post(EMBED, {"input": ["short", text], "add_special_tokens": False})
        assert (reply.status, reply.error["param"]) == (400, "input[1]")
        assert "68 tokens" in reply.error["message"]
        assert "64" in reply.error["message"]
        for keep, tokens in ((-1, 64), (3, 3)):
            fields = {"input": text, "truncate_prompt_tokens": keep, "add_special_tokens": False}
            reply = await client.post(EMBED, fields)
            assert reply.json["usage"]["prompt_tokens"] == tokens
            assert reply.json["data"][0]["embedding"] == pytest.approx(residues("h"))
        whole = await client.post(EMBED, {"input": "x" * 64, "add_special_tokens": False})
        assert whole.json["usage"]["prompt_tokens"] == 64
        await client.quiet()


async def test_many_inputs_go_a_few_at_a_time_and_a_bad_one_ends_them_all(make_client):
    async with make_client(max_num_seqs=2, max_model_len=64) as client:
        texts = [chr(97 + number % 26) for number in range(40)]
        reply = await client.post(EMBED, {"input": texts, "add_special_tokens": False})
        assert [one["embedding"] for one in reply.json["data"]] == [pytest.approx(residues(text)) for text in texts]
        reply = await client.post(EMBED, {"input": [*texts, [999999]], "add_special_tokens": False})
        assert reply.status == 400
        await client.quiet()


async def test_a_call_that_has_begun_is_finished_while_the_server_drains(make_client):
    """Its further inputs were turned away as new requests."""
    async with make_client(step_s=0.01, max_num_seqs=1) as client:
        exchange = client.start(EMBED, {"input": ["a"] * 12})
        while not client.llm.stats.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        drain = asyncio.create_task(client.llm.drain(10))
        await asyncio.wait_for(exchange.task, 5)
        assert exchange.reply.status == 200
        assert len(exchange.reply.json["data"]) == 12
        assert await drain


async def test_who_leaves_frees_what_he_asked_for(make_client):
    async with make_client(step_s=0.01, max_num_seqs=1) as client:
        exchange = client.start(EMBED, {"input": ["a"] * 50})
        while not client.llm.stats.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        exchange.leave()
        await asyncio.wait_for(exchange.task, 5)
        await client.quiet()
        assert client.llm.stats.waiting == 0


async def test_the_account_of_time_sums(client):
    reply = await client.post(EMBED, {"input": ["abc", "d"], "timings": True, "request_id": "mine"})
    account = reply.json["timings"]
    stages = [name for name in account if name.endswith("_ms") and name not in ("total_ms", "itl_ms", "overlapped_ms")]
    assert sum(account[name] for name in stages) == pytest.approx(account["total_ms"])
    assert account["decode_ms"] == account["unaccounted_ms"] == 0
    record = await client.get("/v1/requests/mine")
    assert record.status == 200, record.body
    assert record.json["outcome"] == "finished"
    assert (record.json["prompt_tokens"], record.json["output_tokens"]) == (reply.json["usage"]["prompt_tokens"], 0)


async def test_keys_hold_here_too(make_client):
    async with make_client(config=ServerConfig(api_keys=("secret",))) as client:
        assert (await client.post(EMBED, {"input": "a"})).status == 401
        assert (await client.post(EMBED, {"input": "a"}, headers={"Authorization": "Bearer secret"})).status == 200


async def test_scores_are_cosines_of_one_with_all_or_in_pairs(client):
    plain = {"add_special_tokens": False}
    reply = await client.post("/v1/score", {"text_1": "xa", "text_2": ["ya", "b", "i"], **plain})
    assert [one["score"] for one in reply.json["data"]] == pytest.approx([1, 0, 1])  # "i" is 8 behind "a"
    assert reply.json["usage"]["prompt_tokens"] == 6
    reply = await client.post("/score", {"text_1": ["a", "b"], "text_2": ["b", "b"], **plain})
    assert [(one["index"], one["score"]) for one in reply.json["data"]] == [(0, 0), (1, pytest.approx(1))]
    bad = await client.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert (bad.status, bad.error["param"]) == (400, "text_1")


async def test_rankings_put_the_likest_first(client):
    fields = {"query": "a", "documents": ["b", "a", "c", "i"], "add_special_tokens": False}
    for path in ("/v1/rerank", "/rerank"):
        reply = await client.post(path, fields | {"top_n": 3})
        assert [one["index"] for one in reply.json["results"]] == [1, 3, 0]
        assert reply.json["results"][0]["document"] == {"text": "a"}
        assert reply.json["results"][0]["relevance_score"] == pytest.approx(1)
        short = await client.post(path, fields | {"return_documents": False})
        assert {key for one in short.json["results"] for key in one} == {"index", "relevance_score"}
    assert (await client.post("/rerank", {"query": ["a", "b"], "documents": "c"})).error["param"] == "query"


async def test_openais_client_reads_both_formats(client, serve_http):
    async with serve_http(client.app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as caller:
        plain = {"add_special_tokens": False}
        # It asks for base64 by itself, and gives numbers.
        packed = await caller.embeddings.create(model="stub", input=["ab", "c"], extra_body=plain)
        spelt = await caller.embeddings.create(
            model="stub", input=["ab", "c"], encoding_format="float", extra_body=plain
        )
        for answer in (packed, spelt):
            assert [one.embedding for one in answer.data] == [
                pytest.approx(residues("b")),
                pytest.approx(residues("c")),
            ]
            assert answer.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await caller.embeddings.create(model="stub", input="a", dimensions=100)
