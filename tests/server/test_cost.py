"""What one request may cost: each product of what it asks for is bounded, and the error names what to lower."""

from __future__ import annotations

import pytest

from firsttoken.server.config import ServerConfig

LIMIT = 50_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "n": 128, "max_tokens": 4000}, "n"),
        ({"prompt": ["x"] * 128, "max_tokens": 4000}, "prompt"),
        ({"prompt": ["x" * 3000] * 20, "max_tokens": 1}, "prompt"),
        ({"prompt": "x" * 3000, "n": 20, "max_tokens": 1}, "n"),
        ({"prompt": "x", "n": 2, "max_tokens": 500, "logprobs": 20}, "logprobs"),
        ({"prompt": "x", "n": 120, "logit_bias": {str(token): 1 for token in range(250)}}, "logit_bias"),
    ],
)
async def test_a_product_that_is_too_large_is_refused_by_name(make_client, fields, param: str) -> None:
    async with make_client(config=ServerConfig(max_request_cost=LIMIT // 2)) as client:
        reply = await client.post("/v1/completions", fields)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "request_too_costly", param)
        assert str(LIMIT // 2) in reply.error["message"]
        assert client.llm.stats.running == 0


async def test_a_chat_is_bounded_by_its_longest_answer(make_client) -> None:
    async with make_client(config=ServerConfig(max_request_cost=LIMIT)) as client:
        reply = await client.chat("hi", n=20)  # each as long as the context
        assert (reply.status, reply.error["param"]) == (400, "n")
        assert (await client.chat("hi", n=20, max_tokens=100)).status == 200
        reply = await client.chat("hi", max_tokens=600, logprobs=True, top_logprobs=20)
        assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


async def test_what_is_usual_is_within_the_default(client) -> None:
    for fields in ({"n": 128}, {"logprobs": True, "top_logprobs": 20}, {"n": 8, "logprobs": True, "top_logprobs": 5}):
        assert (await client.chat("hi", **fields)).status == 200
