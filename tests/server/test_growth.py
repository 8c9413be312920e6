"""What an API process holds does not grow with the requests that it has answered, in whatever way they ended."""

from __future__ import annotations

import gc
from collections import Counter

from firsttoken.observability import flight
from firsttoken.server.config import ServerConfig
from tests.server.conftest import forever

CALLS = 9
# What is kept of the steps of the last minutes.
KEPT = "firsttoken.observability.step_history._Piece"


def held() -> dict[str, int]:
    """Objects by their type."""
    gc.collect()
    counts = {
        f"{one.__module__}.{one.__qualname__}": count for one, count in Counter(map(type, gc.get_objects())).items()
    }
    return {
        name: count
        for name, count in counts.items()
        if name.startswith(("firsttoken.", "collections.")) and name != KEPT
    }


async def mixed(client, first: int) -> None:
    """Calls of every kind, each with values that no other has."""
    for number in range(first, first + CALLS):
        name = f"{number:x}"
        leaver = client.start("/v1/completions", {"prompt": name, "max_tokens": 50, "stream": True})
        await leaver.first_byte.wait()
        leaver.leave()
        await leaver.task
        await client.complete(name, request_id=name, cache_salt=name, user=name, seed=number, logprobs=2, max_tokens=2)
        await client.chat(name, stream=True, max_tokens=2, stop=[name], logit_bias={str(number % 200): 1})
        await client.post("/v1/responses", {"input": name, "max_output_tokens": 16})
        await client.post("/v1/messages", {"messages": [{"role": "user", "content": name}], "max_tokens": 2})
        await client.complete(name, max_tokens=0, prompt_logprobs=3)
        await client.post("/v1/completions", {"prompt": "a", name: 1})
        await client.post("/v1/completions", {"prompt": "a", "model": name})
        await client.post(f"/v1/{name}", {})
    await client.quiet()


async def test_calls_of_every_kind_leave_nothing_behind(make_client, monkeypatch):
    monkeypatch.setattr(flight, "KEEP_S", 0.0)
    monkeypatch.setattr(flight, "HASH_AT_BYTES", 1)
    async with make_client(forever, step_s=0, config=ServerConfig(responses_store=5)) as client:
        client.llm.recent.capacity = 5
        counts = []
        for round_number in range(3):
            await mixed(client, 1000 + CALLS * round_number)
            counts.append(held())
    before, after = counts[1:]
    grown = {name: count for name, count in after.items() if count - before.get(name, 0) > CALLS // 3}
    assert grown == {}
