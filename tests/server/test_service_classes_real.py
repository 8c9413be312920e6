"""Service classes from HTTP to the scheduler of a real engine: a tiny random model that has one row."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from firsttoken import AsyncEngineArgs, AsyncLLM
from firsttoken.core.service import KeyRule, ServiceClass, Targets
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client

TARGETS = Targets(keys={"gold": KeyRule(), "batch": KeyRule(max_class=ServiceClass.P2)})
ARGS = AsyncEngineArgs(
    model="random:tiny-llama",
    max_model_len=512,
    max_num_seqs=1,
    threads=1,
    quantization="none",
    dtype="float32",
    targets=TARGETS,
)
LONG = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 2}


@pytest.fixture
async def real():
    async with await AsyncLLM.launch(ARGS, in_process=True) as llm:
        yield Client(build_app(llm, ServerConfig(api_keys=("gold=g", "batch=b"), targets=TARGETS)), llm, None)


@asynccontextmanager
async def occupied(client: Client):
    """A long p2 stream holds the only row."""
    stream = client.start("/v1/completions", {**LONG, "stream": True, "service_tier": "p2"}, headers=bearer("b"))
    # A model without a tokenizer streams nothing before the end: its row is what shows.
    async with asyncio.timeout(5):
        while not client.llm.stats.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    yield stream
    stream.leave()
    await client.quiet()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_better_class_does_not_wait_for_a_worse_one(real):
    async with occupied(real) as running:
        order = []

        async def ask(tier: str) -> None:
            reply = await real.post("/v1/completions", {**SHORT, "service_tier": tier}, headers=bearer("g"))
            assert (reply.status, reply.json["service_tier"]) == (200, tier)
            order.append((tier, running.reply.complete))

        await asyncio.wait_for(asyncio.gather(ask("p2"), ask("p1"), ask("p0")), 20)
        assert order == [("p0", False), ("p1", False), ("p2", True)], "with whether the long one had ended"


async def test_what_does_not_start_in_time_never_does(real):
    async with occupied(real):
        body = {**SHORT, "service_tier": "p2", "deadline_ms": 20}
        reply = await real.post("/v1/completions", body, headers=bearer("g"))
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert (await real.post("/v1/completions", {**body, "deadline_ms": 5000}, headers=bearer("g"))).status == 200


async def test_metrics_tell_how_well_steps_are_predicted(real):
    for _ in range(2):
        await real.post("/v1/completions", {**LONG, "max_tokens": 80}, headers=bearer("g"))
    async with asyncio.timeout(5):
        while not {"prefill", "decode"} <= real.llm.stats.step_time_errors.keys():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    text = (await real.get("/metrics", headers=bearer("g"))).body.decode()
    for kind in ("prefill", "decode"):
        for quantile in ("0.5", "0.9"):
            assert f'firsttoken_step_time_error_ratio{{kind="{kind}",quantile="{quantile}"}} ' in text


async def test_the_official_client_sets_the_tier(real, serve_http):
    async with serve_http(real.app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="g", max_retries=0, timeout=10) as ai:
            done = await ai.completions.create(
                model="random:tiny-llama", prompt=[1, 2, 3], max_tokens=2, extra_body={"service_tier": "priority"}
            )
            assert (done.usage.completion_tokens, done.service_tier) == (2, "priority")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="b", max_retries=0, timeout=10) as ai:
            with pytest.raises(openai.PermissionDeniedError):
                await ai.completions.create(
                    model="random:tiny-llama", prompt=[1, 2, 3], extra_body={"service_tier": "priority"}
                )
