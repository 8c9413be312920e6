"""What the engine computes: the same in any company and from any cache, and never without an end."""

from __future__ import annotations

import asyncio
import random

import pytest

from firsttoken import LLM, SamplingParams

RNG = random.Random(7)


def prompt(tokens: int) -> list[int]:
    return [RNG.randrange(3, 200) for _ in range(tokens)]


async def test_bb19_a_neighbours_penalties_change_nothing(real):
    """Alone, and together in both orders, with prompts of different length."""
    asked = [
        {"prompt": prompt(11), "temperature": 0, "repetition_penalty": 2.0, "max_tokens": 5},
        {"prompt": prompt(37), "seed": 99, "top_k": 1, "max_tokens": 4},
        {"prompt": prompt(5), "seed": 3, "temperature": 1.3, "frequency_penalty": 1.5, "max_tokens": 6},
        {"prompt": prompt(20), "temperature": 0, "logit_bias": {"9": 50}, "max_tokens": 3},
    ]

    async def ids(body):
        reply = await real.post("/v1/completions", {**body, "return_token_ids": True, "ignore_eos": True})
        assert reply.status == 200, reply.body
        return reply.json["choices"][0]["token_ids"]

    alone = [await ids(body) for body in asked]
    assert await asyncio.gather(*(ids(body) for body in asked)) == alone
    assert (await asyncio.gather(*(ids(body) for body in reversed(asked))))[::-1] == alone


async def test_one_that_leaves_itself_no_token_ends_with_a_word_of_its_own_and_nobody_else_does(real):
    """ "a" is all that may come, and may not come twice: it shows with the second token."""
    a = ord("a")
    impossible = {"prompt": [a], "allowed_token_ids": [a], "bad_words": ["aa"], "max_tokens": 9, "ignore_eos": True}
    other = {"prompt": prompt(7), "temperature": 0, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}

    async def post(body, **fields):
        return await real.post("/v1/completions", {**body, **fields})

    alone = await post(other)
    whole, streamed, neighbour = await asyncio.gather(post(impossible), post(impossible, stream=True), post(other))
    assert (whole.status, whole.error["code"], whole.error["type"]) == (
        400,
        "no_token_possible",
        "invalid_request_error",
    )
    assert "bad_words" in whole.error["message"]
    assert [event["choices"][0]["text"] for event in streamed.events[:-1]] == ["a"]
    assert streamed.events[-1]["error"]["code"] == "no_token_possible"
    assert neighbour.json["choices"][0]["token_ids"] == alone.json["choices"][0]["token_ids"]
    assert (await post({**impossible, "max_tokens": 1})).status == 200


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_bb34_rounded_kv_gives_the_same_answer_from_the_cache(kv_dtype):
    """20 times in turn and 20 at once, against an engine without a cache: the same bits were kept either way."""
    asked, params = prompt(300), SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    shared = {"quantization": "none", "dtype": "float32", "threads": 1, "kv_dtype": kv_dtype, "max_model_len": 512}
    with LLM("random:tiny-qwen3", prefix_caching=False, **shared) as llm:
        (cold,) = llm.generate([asked], params)
    with LLM("random:tiny-qwen3", max_num_seqs=32, **shared) as llm:
        answers = [llm.generate([asked], params)[0] for _ in range(20)]
        answers += llm.generate([asked] * 20, params)
        vocabulary = llm.info.vocab_size
    found = [answer.outputs[0].token_ids for answer in answers]
    assert all(ids == found[0] for ids in found)
    assert all(0 <= token < vocabulary for ids in found for token in ids)
    assert found[0] == cold.outputs[0].token_ids
    for answer in answers:
        first = answer.outputs[0].logprobs[0]
        reference = cold.outputs[0].logprobs[0]
        assert first.keys() == reference.keys()
        assert all(first[token].logprob == pytest.approx(reference[token].logprob, abs=1e-4) for token in first)
