"""From a full engine to the caller: a tiny random model that has one row, and a queue of one."""

from __future__ import annotations

import asyncio

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from firsttoken.core.errors import InvalidRequest, Overloaded
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client

TARGETS = Targets(p1=ClassTargets(ttft_p99=60_000), p2=ClassTargets(max_waiting=1))
OPTIONS = {
    "model": "random:tiny-llama",
    "max_model_len": 512,
    "max_num_seqs": 1,
    "threads": 1,
    "quantization": "none",
    "dtype": "float32",
    "targets": TARGETS,
}
LONG = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 2}


@pytest.fixture
async def full():
    """A client of a server whose row is taken and whose queue is full, until ``client.empty()``."""
    async with await AsyncLLM.launch(AsyncEngineArgs(**OPTIONS), in_process=True) as llm:
        client = Client(build_app(llm, ServerConfig()), llm, None)
        held = [client.start("/v1/completions", {**LONG, "stream": True})]
        await stats(client, running=1)
        held.append(client.start("/v1/completions", {**LONG, "stream": True}))
        await stats(client, waiting=1)

        async def empty() -> None:
            for exchange in held:
                exchange.leave()
            await client.quiet()

        client.empty = empty
        yield client


async def stats(client: Client, **expected: int) -> None:
    async with asyncio.timeout(5):
        while any(getattr(client.llm.stats, name) != value for name, value in expected.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(full, stream):
    reply = await full.post("/v1/completions", {**SHORT, "stream": stream})
    assert reply.status == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert (reply.error["code"], reply.error["type"], reply.error["param"]) == ("overloaded", "overloaded", None)
    assert (
        "1 requests of class p2 wait already, and a new one is let in while fewer than 1 do (max_waiting)"
        in reply.error["message"]
    )
    assert f"try again in {reply.headers['retry-after']} s" in reply.error["message"]
    await full.empty()
    assert (await full.post("/v1/completions", SHORT)).status == 200


async def test_another_class_has_its_own_queue(full):
    assert (await full.post("/v1/completions", {**SHORT, "service_tier": "p1"})).status == 200


async def test_what_can_never_run_is_a_400_all_the_same(full):
    reply = await full.post("/v1/completions", {**SHORT, "prompt": [1] * 600})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_no_answer_is_given_where_one_of_several_has_no_room(full):
    assert (await full.post("/v1/completions", {**SHORT, "n": 3, "temperature": 1})).status == 429
    await full.empty()  # nothing is left of them
    assert (await full.post("/v1/completions", {**SHORT, "n": 2, "temperature": 1})).status == 200


async def test_the_official_client_comes_again_by_itself(full, serve_http):
    async with serve_http(full.app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=10) as once:
            with pytest.raises(openai.RateLimitError) as caught:
                await once.completions.create(model="random:tiny-llama", prompt=[1, 2, 3], max_tokens=2)
            assert caught.value.code == "overloaded"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=2, timeout=10) as patient:
            asking = asyncio.create_task(
                patient.completions.create(model="random:tiny-llama", prompt=[1, 2, 3], max_tokens=2)
            )
            await asyncio.sleep(0.1)
            await full.empty()
            assert (await asking).usage.completion_tokens >= 1


async def test_metrics_tell_of_each_class(full):
    for _ in range(2):
        await full.post("/v1/completions", SHORT)
    async with asyncio.timeout(5):
        while full.llm.stats.classes[2].refused["queue"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    text = (await full.get("/metrics")).body.decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "service_class" in sample.labels
    }
    assert found[("firsttoken_class_requests_waiting", "p2")] == 1
    assert found[("firsttoken_class_requests_waiting", "p0")] == 0
    assert found[("firsttoken_requests_turned_away_total", "queue", "p2")] == 2
    assert found[("firsttoken_requests_turned_away_total", "ttft", "p1")] == 0
    assert found[("firsttoken_requests_ended_total", "refused", "p2")] == 2
    assert found[("firsttoken_requests_ended_total", "failed", "p2")] == 0
    assert found[("firsttoken_predicted_time_to_first_token_seconds", "p2")] >= 0
    assert found[("firsttoken_seconds_until_target_missed", "p1")] == float("inf")
    assert ("firsttoken_seconds_until_target_missed", "p2") not in found, "it is promised nothing"


async def test_python_callers_get_a_typed_error(full):
    with pytest.raises(Overloaded) as caught:
        async for _ in full.llm.generate([1, 2, 3], SamplingParams(max_tokens=2)):
            pass
    assert caught.value.retry_after_s >= 1
    assert not isinstance(caught.value, InvalidRequest)


def test_a_batch_in_this_process_waits_here_for_what_has_no_room_there():
    with LLM(**OPTIONS) as llm:
        outputs = llm.generate(
            [[1, 2, number] for number in range(1, 41)], SamplingParams(max_tokens=3, ignore_eos=True)
        )
    assert [output.prompt_token_ids[-1] for output in outputs] == list(range(1, 41))
    assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
