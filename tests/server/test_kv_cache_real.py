"""The KV cache as callers of a real engine see it: a tiny random model with all three tiers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from firsttoken import AsyncEngineArgs, AsyncLLM
from firsttoken.core.service import KeyRule, Targets
from firsttoken.engine import tiers
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client

TEAM = KeyRule(cache_group="team")
TARGETS = Targets(keys={"carl": TEAM, "dora": TEAM})
CONFIG = ServerConfig(api_keys=("anna", "eve", "carl=carl", "dora=dora"), targets=TARGETS)
PROMPT, OTHER, THIRD, TEAMS = ([1 + (step * i) % 251 for i in range(401)] for step in (1, 2, 3, 5))
NOTHING = {"device": 0, "host": 0, "disk": 0}


@pytest.fixture(autouse=True)
def restoring_pays(monkeypatch):
    """A tiny model computes sooner than anything is restored."""
    monkeypatch.setattr(tiers, "recompute_cost", lambda step_time, most: lambda start, end: 1e6)


@asynccontextmanager
async def serving(folder: Path | None = None, config: ServerConfig = CONFIG, **options: Any):
    lower = {} if folder is None else {"kv_host_memory": 8 << 20, "kv_disk": str(folder), "kv_disk_size": 64 << 20}
    args = AsyncEngineArgs(
        model="random:tiny-llama", max_model_len=512, max_num_seqs=2, threads=1, quantization="none", dtype="float32",
        targets=config.targets, **{**lower, **options},
    )  # fmt: skip
    async with await AsyncLLM.launch(args, in_process=True) as llm:
        yield Client(build_app(llm, config), llm, None)


async def ask(client: Client, key: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "timings": True, **fields}
    reply = await client.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    assert reply.status == 200, reply.body
    cached = reply.json["timings"]["cached_tokens"]
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(cached.values()), "of all tiers"
    return reply.json


async def found(client: Client, key: str, prompt: list[int] = PROMPT) -> dict[str, int]:
    return (await ask(client, key, prompt))["timings"]["cached_tokens"]


async def until(client: Client, key: str, holds: Any) -> dict[str, Any]:
    """What the dashboard tells once that holds of it."""
    async with asyncio.timeout(5):
        while True:
            reply = await client.get("/v1/kv", headers={"authorization": f"Bearer {key}"})
            assert reply.status == 200
            if reply.json["hits"] is not None and holds(reply.json):
                return reply.json
            await asyncio.sleep(0.02)


async def flood(client: Client, key: str) -> None:
    """All of the device's blocks, but for what outlives 240 others."""
    for number in range(8):
        await ask(client, key, [10 + number] * 480)


async def copied(client: Client, blocks: int) -> None:
    """What was asked lies in host memory too."""
    await until(client, "anna", lambda told: told["restores"]["spilled_blocks"] >= blocks)


BLOCK = 3 * 2 * 3 * 16 * 12 * 4  # bytes


async def test_tenants_share_nothing_in_any_tier_and_groups_all(tmp_path):
    options = {"kv_memory": 160 * BLOCK, "kv_eviction": "lru"}
    async with serving(tmp_path, **options) as client:
        assert await found(client, "anna", PROMPT) == NOTHING
        assert await found(client, "eve", PROMPT) == NOTHING
        assert (await found(client, "anna", PROMPT))["device"] == 400
        for key, prompt in (("anna", OTHER), ("anna", THIRD), ("carl", TEAMS)):
            assert await found(client, key, prompt) == NOTHING
        assert (await found(client, "dora", TEAMS))["device"] == 400
        await copied(client, 5 * 25)
        await flood(client, "anna")
        assert await found(client, "eve", OTHER) == NOTHING
        assert (await found(client, "anna", OTHER))["host"] == 400
        assert (await found(client, "dora", TEAMS))["host"] == 400
    async with serving(tmp_path, **options) as client:
        for key, prompt, disk in (
            ("eve", THIRD, 0), ("eve", TEAMS, 0), ("anna", TEAMS, 0), ("dora", THIRD, 0), ("anna", THIRD, 400),
            ("dora", TEAMS, 400),
        ):  # fmt: skip
            assert await found(client, key, prompt) == {**NOTHING, "disk": disk}, (key, disk)


async def test_a_server_without_keys_finds_nothing_of_one_with_keys(tmp_path):
    async with serving(tmp_path, kv_memory=36 * BLOCK) as client:
        await ask(client, "anna", PROMPT)
        await ask(client, "carl", PROMPT)
    async with serving(tmp_path, ServerConfig(), kv_memory=36 * BLOCK) as client:
        assert await found(client, "", PROMPT) == NOTHING
        for salt in ("anna", "carl", "group/team", "team"):
            assert (await ask(client, "", PROMPT, cache_salt=salt))["timings"]["cached_tokens"] == NOTHING
        assert sum((await found(client, "", PROMPT)).values()) == 400


# ------------------------------------------------------------------ hints


async def test_what_is_kept_outlives_a_flood_and_what_has_no_room_is_told(tmp_path):
    async with serving(kv_memory=120 * BLOCK) as client:  # a quarter may be kept: one prompt of 26 blocks
        kept = await ask(client, "anna", PROMPT, cache_hint={"ttl_s": 60})
        ignored = await ask(client, "anna", OTHER, cache_hint={"ttl_s": 60})
        assert (kept["timings"]["kept"], ignored["timings"]["kept"]) == (True, False)
        assert (kept["timings"]["kept_reason"], ignored["timings"]["kept_reason"]) == (None, "quota")
        await flood(client, "anna")
        assert (await found(client, "anna", PROMPT))["device"] == 400
        missed = (await ask(client, "anna", OTHER))["timings"]
        assert (missed["cached_tokens"]["device"], missed["miss"]["reason"], missed["kept"]) == (0, "evicted", None)
        told = await until(client, "anna", lambda told: told["hints"]["ignored"])
        assert told["hints"] == {"kept": 1, "ignored": 1, "kept_blocks": 25}


async def test_a_tool_result_ends_what_was_kept_for_it(tmp_path):
    async with serving(kv_memory=120 * BLOCK, kv_eviction="lru") as client:
        first = await ask(client, "anna", PROMPT, cache_hint={"until": "tool_result"}, return_token_ids=True)
        assert first["timings"]["kept"] is True
        await flood(client, "anna")
        answer = first["choices"][0]["token_ids"]
        assert (await found(client, "anna", [*PROMPT, *answer, 7, 8]))["device"] == 400
        await until(client, "anna", lambda told: told["hints"]["kept_blocks"] == 0)
        await flood(client, "anna")
        assert await found(client, "anna", PROMPT) == NOTHING


# ------------------------------------------------------------------ told to operators


async def test_the_dashboard_and_the_metrics_add_up(tmp_path):
    async with serving(tmp_path, kv_memory=36 * BLOCK) as client:
        asked = []
        for number, prompt in enumerate(prompts := [PROMPT, PROMPT, OTHER, THIRD, OTHER, PROMPT]):
            asked.append(await ask(client, "anna", prompt, service_tier="p1"))
            if number < 4:
                await copied(client, 25 * max(1, number))
        tokens = {tier: sum(one["timings"]["cached_tokens"][tier] for one in asked) for tier in NOTHING}
        assert tokens["device"] >= 400
        assert tokens["host"] >= 400
        total = len(prompts) * 401
        told = await until(client, "anna", lambda told: told["hits"]["p1"]["device"]["asked"] == total)
        assert {tier: told["hits"]["p1"][tier]["found"] for tier in NOTHING} == tokens
        assert told["hits"]["p1"]["host"]["asked"] == total - tokens["device"]
        heat = told["heat"]["tokens"]["p1"]
        assert sum(sum(kind) for kind in heat.values()) == total
        assert sum(heat["missed"]) == total - sum(tokens.values())
        assert sum(told["misses"].values()) == sum(one["timings"]["miss"] is not None for one in asked)
        assert told["restores"]["host_tokens"] == tokens["host"]
        assert told["evictions"]["shards"]["p1"]["p1"] > 0
        text = (await client.get("/metrics", headers={"authorization": "Bearer anna"})).body.decode()
        hits = 'firsttoken_prefix_cache_hits_total{service_class="p1",tier="host"} ' + f"{tokens['host']:.1f}"
        assert hits in text
        assert "other_salt" not in text
        assert (await client.get("/v1/kv")).status == 401
