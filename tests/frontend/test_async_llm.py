"""The asynchronous front end as a whole: start, text, vLLM's generator, drain, shutdown, an engine in a process."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from itertools import pairwise

import pytest

import firsttoken
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import EngineDead, EngineDraining, InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.stub import Fault, StubConfig, StubEngine, StubProcess
from firsttoken.frontend.async_llm import AsyncLLM
from tests.support.byte_tokenizer import BOS, EOS, VOCAB_SIZE
from tests.support.stub_llm import PROMPT, read, says, settle, text_of


def endless(request):
    """Importable by the child process of `StubProcess`."""
    return [97] * 4000


async def outputs(stream):
    return [output async for output in stream]


async def test_generate_gives_cumulative_outputs(serve):
    llm = await serve(says("hello"), cached_tokens=1, step_s=0.005)
    got = await outputs(llm.generate("abc", SamplingParams(max_tokens=50, logprobs=2), "mine"))
    texts = [output.outputs[0].text for output in got]
    assert texts[-1] == "hello"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    last = got[-1]
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    assert last.request_id == "mine"
    assert last.prompt == "abc"
    assert last.prompt_token_ids == [*b"abc"]
    assert last.num_cached_tokens == 1
    answer = last.outputs[0]
    assert answer.token_ids == [*b"hello", EOS]
    assert answer.cumulative_logprob == pytest.approx(-3.0)
    assert len(answer.logprobs) == 6
    first = answer.logprobs[0]
    assert list(first) == [ord("h"), ord("i")]
    assert (first[ord("h")].decoded_token, first[ord("h")].rank, first[ord("i")].logprob) == ("h", 1, -1.5)
    assert last.metrics["unaccounted_ms"] == 0
    assert got[0].outputs[0].token_ids != answer.token_ids, "an earlier output may not change later"


async def test_who_has_an_answer_can_look_at_its_steps(serve):
    llm = await serve(says("hello"), step_s=0.002)
    await outputs(llm.generate("abc", SamplingParams(max_tokens=50)))
    steps = llm.steps.last(10)
    assert [step.prefill_tokens for step in steps] == [3, 0, 0, 0, 0, 0]
    assert [step.decode_rows for step in steps] == [0, 1, 1, 1, 1, 1]
    assert llm.steps.between(steps[2].planned_ns, steps[2].harvested_ns - 1) == [steps[2]]


async def test_steps_before_a_death_are_known_after_it(serve):
    llm = await serve(says([*b"hello", Fault("the device is gone", fatal=True)]), step_s=0.002)
    with pytest.raises(EngineDead, match="the device is gone"):
        await outputs(llm.generate("abc", SamplingParams(max_tokens=50)))
    assert len(llm.steps.last(10)) == 6
    assert llm.stats.steps == 6


async def test_generate_keeps_all_n_answers_in_every_output(serve):
    lengths = iter([1, 8, 3])
    llm = await serve(lambda request: [97] * next(lengths), step_s=0.001)
    got = await outputs(llm.generate([1, 2, 3], SamplingParams(n=3, max_tokens=50)))
    assert all([answer.index for answer in output.outputs] == [0, 1, 2] for output in got)
    assert [len(answer.text) for answer in got[-1].outputs] == [1, 8, 3]
    assert all(answer.finish_reason == "stop" for answer in got[-1].outputs)


@pytest.mark.parametrize("prompt", ["ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}])
async def test_generate_takes_every_form_of_prompt(serve, prompt):
    llm = await serve(lambda request: list(array("I", request.prompt)))
    assert (await outputs(llm.generate(prompt, SamplingParams())))[-1].outputs[0].text == "ab"


async def test_leaving_the_generator_aborts(serve):
    llm = await serve(endless, step_s=0.001)
    stream = llm.generate([1], SamplingParams(max_tokens=None))
    await anext(stream)
    await stream.aclose()
    await settle(llm, running=0, kv_used=0, aborted=1)
    task = asyncio.create_task(outputs(llm.generate([1], SamplingParams(max_tokens=None))))
    await settle(llm, running=1)
    task.cancel()
    await settle(llm, running=0, kv_used=0, aborted=2)
    assert not llm._named


async def test_abort_by_name_ends_all_that_share_it(serve):
    llm = await serve(endless, step_s=0.001)
    streams = [asyncio.create_task(outputs(llm.generate([1], SamplingParams(max_tokens=None), "x"))) for _ in "ab"]
    await settle(llm, running=2)
    await llm.abort("unknown")
    await llm.abort("x")
    for got in await asyncio.wait_for(asyncio.gather(*streams), 1):
        assert got[-1].finished
        assert got[-1].outputs[0].finish_reason == "abort"
    await settle(llm, running=0, aborted=2)


async def test_text_is_encoded_and_chats_rendered(serve):
    llm = await serve(says("x"))
    assert (await llm.tokenize("ab<|bos|>")).tolist() == [97, 98, BOS]
    rendered = await llm.render_chat([{"role": "user", "content": "Hi"}])
    assert rendered.text == "<user>Hi\n<assistant>"
    bare = await llm.render_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert bare.text == "<user>Hi\n"
    assert bytes(bare.ids.tolist()) == b"<user>Hi\n"
    with pytest.raises(InvalidRequest, match="characters"):
        await llm.tokenize("x" * (4096 * 8 + 1))
    textless = await serve(says("x"), text=False)
    for work in (textless.tokenize("x"), textless.render_chat([{"role": "user", "content": "x"}])):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await work


async def test_what_the_front_end_says_of_itself(serve):
    llm = await serve(says("x"))
    assert llm.info.vocab_size == VOCAB_SIZE
    assert llm.model_name == "stub"
    assert abs(llm.created - time.time()) < 60
    assert llm.is_running
    assert not llm.errored
    assert llm.progress().state == "idle"
    assert firsttoken.AsyncLLMEngine is AsyncLLM
    assert firsttoken.AsyncEngineArgs is firsttoken.EngineArgs is EngineArgs
    assert {"LLM", "AsyncLLMEngine", "SamplingParams"} <= set(dir(firsttoken))
    for wrong in ("smollm2", EngineArgs()):
        with pytest.raises(TypeError, match="from_engine_args"):
            AsyncLLM(wrong)
    assert b'model="stub"' in llm.metrics.render()


async def test_progress_tells_busy_from_idle(serve):
    llm = await serve(endless, step_s=0.005)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=None))
    await anext(generation)
    assert llm.progress().state == "busy"
    generation.cancel()
    await settle(llm, running=0)
    await asyncio.sleep(0.15)
    assert llm.progress().state == "idle"


async def test_drain_refuses_new_and_waits_for_running(serve):
    llm = await serve(says("x" * 40), step_s=0.005)
    running = asyncio.create_task(read(llm.open(PROMPT, SamplingParams(max_tokens=100))))
    draining = asyncio.create_task(llm.drain(5))
    await asyncio.sleep(0.02)
    assert llm.is_draining
    with pytest.raises(EngineDraining):
        llm.open(PROMPT, SamplingParams())
    assert await asyncio.wait_for(draining, 2) is True
    assert text_of(await running) == "x" * 40


async def test_drain_gives_up_after_its_time(serve):
    llm = await serve(endless, step_s=0.005)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=None))
    assert await llm.drain(0.05) is False
    await llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await read(generation)
    await llm.shutdown()


@pytest.mark.clock
async def test_drain_with_nothing_running_is_immediate(serve):
    llm = await serve(says("x"))
    began = time.monotonic()
    assert await llm.drain(5)
    assert time.monotonic() - began < 0.5


async def test_an_engine_that_cannot_start_says_why(tokenizer):
    handle = StubEngine(says("x"), fail_start="no memory for the weights")
    llm = AsyncLLM(handle, tokenizer=tokenizer)
    with pytest.raises(EngineDead, match="no memory for the weights"):
        await llm.start()
    assert not handle.alive()


async def test_a_shutdown_while_starting_ends_the_start(tokenizer):
    handle = StubEngine(says("hi"), start_s=0.3)
    llm = AsyncLLM(handle, tokenizer=tokenizer)
    starting = asyncio.create_task(llm.start())
    await asyncio.sleep(0.02)
    await llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await asyncio.wait_for(starting, 1)


async def test_a_cancelled_start_leaves_no_error_for_asyncio_to_log(tokenizer, caplog):
    llm = AsyncLLM(StubEngine(says("hi"), start_s=0.3), tokenizer=tokenizer)
    starting = asyncio.create_task(llm.start())
    await asyncio.sleep(0.02)
    starting.cancel()
    await llm.shutdown()
    del llm
    gc.collect()
    await asyncio.sleep(0)
    assert not caplog.records


async def test_use_before_start_is_an_error_and_generate_starts(tokenizer):
    llm = AsyncLLM(StubEngine(says("hi"), start_s=0.05), tokenizer=tokenizer)
    with pytest.raises(RuntimeError, match="start"):
        llm.open(PROMPT, SamplingParams())
    got = await asyncio.gather(*(outputs(llm.generate("a", SamplingParams(max_tokens=2))) for _ in range(3)))
    assert [each[-1].outputs[0].text for each in got] == ["hi"] * 3
    await llm.shutdown()
    with pytest.raises(RuntimeError, match="handle"):
        await AsyncLLM().start()


@pytest.mark.clock
async def test_a_killed_engine_process_is_noticed_within_a_second(tokenizer):
    handle = StubProcess(f"{__name__}:endless", StubConfig(vocab_size=VOCAB_SIZE, step_s=0.002))
    llm = AsyncLLM(handle, tokenizer=tokenizer)
    await llm.start()
    generation = llm.open(PROMPT, SamplingParams(max_tokens=None, n=3))
    assert (await anext(generation)).text
    handle.kill()
    killed = time.monotonic()
    with pytest.raises(EngineDead, match=r"killed by signal 9 \(SIGKILL; out of memory\?\)"):
        await read(generation)
    assert time.monotonic() - killed < 1
    with pytest.raises(EngineDead):
        llm.open(PROMPT, SamplingParams())
    await llm.shutdown()


async def test_a_process_streams_like_a_thread(tokenizer):
    handle = StubProcess(f"{__name__}:endless", vocab_size=VOCAB_SIZE)
    async with AsyncLLM(handle, tokenizer=tokenizer) as llm:
        many = await asyncio.gather(*(read(llm.open(PROMPT, SamplingParams(max_tokens=30))) for _ in range(32)))
        assert all(text_of(deltas) == "a" * 30 for deltas in many)
        await settle(llm, running=0, finished=32)
    assert not handle.alive()


async def test_the_engine_process_is_in_the_metrics(tokenizer):
    async with AsyncLLM(StubProcess(f"{__name__}:endless", vocab_size=VOCAB_SIZE), tokenizer=tokenizer) as llm:
        assert b"\nfirsttoken_engine_process_resident_memory_bytes " in llm.metrics.render()


async def test_a_launch_that_is_cancelled_leaves_no_engine(monkeypatch):
    handles, started, loop = [], asyncio.Event(), asyncio.get_running_loop()

    def start(args, in_process):
        handles.append(StubProcess(f"{__name__}:endless", vocab_size=VOCAB_SIZE, start_s=30.0))
        loop.call_soon_threadsafe(started.set)
        return handles[-1]

    monkeypatch.setattr("firsttoken.frontend.async_engine.start_engine", start)
    launching = asyncio.create_task(AsyncLLM.launch(EngineArgs(model="random:tiny-llama")))
    await started.wait()
    await asyncio.sleep(0.05)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert not handles[0].alive()


async def test_a_silent_death_is_seen_without_the_channel(serve):
    class Zombie(StubEngine):
        dead = False

        def alive(self):
            return not self.dead

    engine = Zombie(endless, freeze_after=0)
    llm = await serve(endless, engine=engine)
    generation = llm.open(PROMPT, SamplingParams())
    engine.dead = True
    with pytest.raises(EngineDead, match="without a word"):
        await asyncio.wait_for(read(generation), 1)


async def test_what_could_not_be_sent_fails_and_leaves_nothing(serve):
    llm = await serve(endless)
    llm._engine.link.handle.client.close()
    generation = llm.open(PROMPT, SamplingParams())
    with pytest.raises(EngineDead):
        await asyncio.wait_for(read(generation), 1)
    assert llm._engine.link.live == 0
    assert await llm.drain(1), "nothing runs"
    rendered = llm.metrics.render()
    assert b'\nfirsttoken_requests_started_total{service_class="p2"} 1.0' in rendered
    assert b'firsttoken_requests_ended_total{outcome="failed",service_class="p2"} 1.0' in rendered
    with pytest.raises(EngineDead):
        llm.open(PROMPT, SamplingParams())


async def test_one_slow_reader_does_not_hold_up_the_others(serve):
    llm = await serve(says("y" * 60), step_s=0.001)
    slow = llm.open(PROMPT, SamplingParams(max_tokens=50))
    quick = await asyncio.wait_for(
        asyncio.gather(*(read(llm.open(PROMPT, SamplingParams(max_tokens=50))) for _ in range(8))), 2
    )
    assert all(text_of(deltas) == "y" * 50 for deltas in quick)
    assert text_of(await read(slow)) == "y" * 50


async def test_three_hundred_abandoned_streams_leave_nothing(serve):
    llm = await serve(endless)
    for _ in range(300):
        generation = llm.open(PROMPT, SamplingParams(max_tokens=512))
        await anext(generation)
        generation.cancel()
    await settle(llm, running=0, waiting=0, kv_used=0)
    assert llm._engine.link.live == 0
    assert text_of(await read(llm.open(PROMPT, SamplingParams(max_tokens=3)))) == "aaa"
