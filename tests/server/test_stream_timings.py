"""``timings`` in streams: on the chunk that ends the last answer, so that every chunk has a choice unless the usage
was asked for."""

from __future__ import annotations

import pytest

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "hi"})
SEVERAL = ("/v1/completions", {"prompt": ["hi", "ho"]})


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION, SEVERAL])
async def test_without_usage_no_chunk_is_without_a_choice(client, path, body, n):
    reply = await client.post(path, {**body, "n": n, "stream": True, "timings": True})
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"][0]["finish_reason"]
    assert chunks[-1]["timings"]["total_ms"] > 0
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("timings", [False, True])
@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION, SEVERAL])
async def test_with_usage_the_one_chunk_without_a_choice_has_both(client, path, body, timings, always):
    options = {"include_usage": True, "continuous_usage_stats": always}
    reply = await client.post(path, {**body, "n": 2, "stream": True, "timings": timings, "stream_options": options})
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1] * timings


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
async def test_nothing_extra_unasked(client, path, body):
    reply = await client.post(path, {**body, "stream": True})
    assert all(chunk["choices"] and "timings" not in chunk for chunk in reply.events[:-1])
