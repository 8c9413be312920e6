"""An engine that dies is started again, so often and no more; what is kept beside it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, EngineDead, EngineRestarting
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.stub import StubConfig, StubEngine, StubProcess
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.frontend.restarts import RestartPolicy, Restarts
from tests.support.byte_tokenizer import GENERATION, VOCAB_SIZE
from tests.support.stub_llm import PROMPT, read, settle, text_of

QUICK = RestartPolicy(limit=3, pause_s=0.01)


def endless(request):
    return [97] * request.max_tokens


class Engines:
    """Starts stubs, the first at once; each further one as ``later`` says for its turn."""

    def __init__(self, *later: dict, **options):
        self.later = list(later)
        self.options = {"vocab_size": VOCAB_SIZE, "step_s": 0.002, "heartbeat_s": 0.02, **options}
        self.made = [StubEngine(endless, StubConfig(), **self.options)]

    @property
    def latest(self) -> StubEngine:
        return self.made[-1]

    def __call__(self) -> StubEngine:
        options = self.later.pop(0) if self.later else {}
        if error := options.get("error"):
            raise error
        self.made.append(StubEngine(endless, StubConfig(), **self.options | options))
        return self.latest


@contextlib.asynccontextmanager
async def running(engines: Engines, tokenizer, policy: RestartPolicy = QUICK):
    llm = AsyncLLM(
        engines.latest,
        tokenizer=tokenizer,
        generation_config=GENERATION,
        launch_engine=engines,
        restarts=policy,
        seed=0,
    )
    await llm.start()
    try:
        yield llm
    finally:
        await llm.shutdown()
    assert not any(engine.alive() for engine in engines.made)


async def until(what) -> None:
    async with asyncio.timeout(5):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def sample(llm: AsyncLLM, name: str, **labels: str) -> float | None:
    return llm.metrics.registry.get_sample_value(f"firsttoken_{name}", labels)


async def test_requests_end_with_their_engine_and_the_next_is_served_by_another(tokenizer):
    engines = Engines({"start_s": 0.1})
    async with running(engines, tokenizer) as llm:
        done = await read(llm.open(PROMPT, SamplingParams(max_tokens=5)))
        generation = llm.open(PROMPT, SamplingParams(max_tokens=None))
        await anext(generation)
        steps, ids = llm.steps.last(1)[0].step_id, generation.engine_ids
        engines.latest.kill("the device is on fire")
        with pytest.raises(EngineDead, match="on fire") as died:
            await read(generation)
        assert died.value.retry_after_s >= 1
        with pytest.raises(EngineRestarting, match="on fire") as refused:
            llm.open(PROMPT, SamplingParams())
        assert refused.value.retry_after_s >= 1
        with pytest.raises(EngineRestarting):
            llm.info  # noqa: B018
        assert (llm.progress().state, llm.is_running, llm.errored) == ("restarting", False, True)
        assert (sample(llm, "engine_up"), sample(llm, "requests_running")) == (0, 0)
        before = llm.stats
        await until(lambda: llm.is_running)
        after = llm.open(PROMPT, SamplingParams(max_tokens=4))
        assert text_of(await read(after)) == "aaaa" == text_of(done)[:4]
        assert after.engine_ids[0] > ids[-1], "a number names one request for ever"
        await settle(llm, running=0)
        health = llm.progress()
        assert (health.state, health.restarts) == ("idle", 1)
        assert llm.steps.since(steps), "steps are numbered on"
        assert llm.stats.steps >= before.steps + 4
        assert llm.stats.output_tokens == before.output_tokens + 4
        value = [sample(llm, name) for name in ("engine_up", "engine_deaths_total", "engine_restarts_total")]
        assert value == [1, 1, 1]
    assert sample(llm, "engine_deaths_total") == 1, "an end that was asked for is no death"


async def test_attempts_that_fail_count_and_after_the_last_it_is_lost(tokenizer, caplog):
    engines = Engines({"fail_start": "no memory"}, {"error": OSError("no process")}, {"fail_start": "none at all"})
    async with running(engines, tokenizer) as llm:
        lost = asyncio.create_task(llm.lost())
        engines.latest.kill()
        assert await asyncio.wait_for(lost, 5) == "the engine stopped: none at all"
        with pytest.raises(EngineDead, match="none at all") as error:
            llm.open(PROMPT, SamplingParams())
        assert type(error.value) is EngineDead
        assert error.value.retry_after_s is None
        assert (llm.progress().state, len(engines.made)) == ("dead", 3)
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.startswith("the engine is started again")] == [
        "the engine is started again",
        "the engine is started again in 0.01 s",
        "the engine is started again in 0.02 s",
    ]
    assert "no process" in caplog.text
    assert "--engine-restarts" in told[-1]


async def test_one_that_dies_as_soon_as_it_is_ready_is_tried_again(tokenizer):
    class Fleeting(Engines):
        def __call__(self):
            engine = super().__call__()
            if len(self.made) == 2:
                engine.kill("gone again")
            return engine

    engines = Fleeting({}, {})
    async with running(engines, tokenizer) as llm:
        engines.latest.kill()
        await until(lambda: len(engines.made) == 3 and llm.is_running)
        assert text_of(await read(llm.open(PROMPT, SamplingParams(max_tokens=3)))) == "aaa"


async def test_without_restarts_it_is_lost_at_once(tokenizer):
    engines = Engines()
    async with running(engines, tokenizer, RestartPolicy()) as llm:
        engines.latest.kill("over")
        assert await asyncio.wait_for(llm.lost(), 2) == "the engine stopped: over"
        assert len(engines.made) == 1


@pytest.mark.parametrize("why", ["drain", "shutdown"])
async def test_a_server_that_ends_starts_no_engine(tokenizer, why):
    engines = Engines({"start_s": 0.2})
    async with running(engines, tokenizer) as llm:
        generation = llm.open(PROMPT, SamplingParams(max_tokens=None))
        await anext(generation)
        if why == "drain":
            draining = asyncio.create_task(llm.drain(5))
            await asyncio.sleep(0)
            engines.latest.kill("over")
            with pytest.raises(EngineDead) as error:
                await read(generation)
            assert error.value.retry_after_s is None
            assert await asyncio.wait_for(draining, 2)
        else:
            engines.latest.kill("over")
            await until(lambda: llm.progress().state == "restarting")
    assert len(engines.made) <= (1 if why == "drain" else 2)


@pytest.mark.parametrize("how", ["silent", "no step ends"])
async def test_an_engine_that_hangs_is_found(tokenizer, how):
    options = {"heartbeat_s": 30.0} if how == "silent" else {"freeze_after": 0}
    engines = Engines({"heartbeat_s": 0.02, "freeze_after": None}, **options)
    policy = RestartPolicy(limit=1, pause_s=0.01, hung_after_s=0.2)
    async with running(engines, tokenizer, policy) as llm:
        if how == "no step ends":
            with pytest.raises(EngineDead, match=r"it hangs: .* for 0\.2 s"):
                await read(llm.open(PROMPT, SamplingParams()))
        await until(lambda: len(engines.made) == 2 and llm.is_running)


async def test_a_stopped_process_hangs_and_is_killed(tokenizer):
    first = StubProcess(f"{__name__}:endless", StubConfig(vocab_size=VOCAB_SIZE, heartbeat_s=0.05))
    policy = RestartPolicy(limit=1, hung_after_s=0.4)
    llm = AsyncLLM(first, tokenizer=tokenizer, launch_engine=lambda: Engines().latest, restarts=policy)
    await llm.start()
    os.kill(first.pid, signal.SIGSTOP)
    await until(lambda: llm.errored)
    await until(lambda: llm.is_running)
    assert not first.alive()
    assert text_of(await read(llm.open(PROMPT, SamplingParams(max_tokens=3)))) == "aaa"
    await llm.shutdown()


def test_restarts_are_bounded_in_time_and_pauses_grow():
    restarts = Restarts(RestartPolicy(limit=3, within_s=100, pause_s=2))
    seen = []
    for second in (0, 1, 2, 50, 101, 102):
        pause = restarts.pause_s(second * NS_PER_S)
        seen.append(pause)
        if pause is not None:
            restarts.begin(second * NS_PER_S)
    assert seen == [0, 2, 4, None, 2, 2], "those before the last 100 s are forgotten"
    assert Restarts(RestartPolicy()).pause_s(0) is None


@pytest.mark.parametrize(
    "wrong", [{"limit": -1}, {"within_s": 0}, {"pause_s": float("inf")}, {"hung_after_s": float("nan")}]
)
def test_policies_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"must be .*got"):
        RestartPolicy(**wrong)


def test_a_thread_is_not_started_again():
    with pytest.raises(ConfigError, match="cannot be started again"):
        AsyncLLM.from_engine_args(EngineArgs(), in_process=True, restarts=QUICK)
