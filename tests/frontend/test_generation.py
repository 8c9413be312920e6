"""What a caller of one request sees: text, tokens, ends, failures."""

from __future__ import annotations

import asyncio

import pytest

from firsttoken.core.errors import EngineDead, InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.timeline import Mark
from firsttoken.engine.stub import Fault
from firsttoken.frontend.failures import GenerationFailed
from tests.support.byte_tokenizer import EOS, EOT
from tests.support.stub_llm import PROMPT, read, says, settle, text_of, tokens_of

P2 = {"service_class": "p2"}


async def test_text_streams_and_ends_at_the_end_token(serve):
    llm = await serve(says("hello"))
    generation = llm.open(PROMPT, SamplingParams(max_tokens=50))
    deltas = await read(generation)
    assert text_of(deltas) == "hello"
    assert tokens_of(deltas) == [*b"hello", EOS]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert deltas[-1].stop_reason is None
    assert generation.prompt_tokens == 3
    assert generation.completion_tokens == 6
    assert generation.finished


async def test_length_ends_the_answer(serve):
    llm = await serve(says("hello"))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=3)))
    assert text_of(deltas) == "hel"
    assert deltas[-1].finish_reason == "length"


async def test_max_tokens_none_and_too_many_mean_the_rest_of_the_context(serve):
    llm = await serve(lambda request: [97] * 1000, max_model_len=40)
    for params in (SamplingParams(max_tokens=None), SamplingParams(max_tokens=999)):
        deltas = await read(llm.open(PROMPT, params))
        assert len(tokens_of(deltas)) == 37
        assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("end", [EOS, EOT])
async def test_every_end_token_of_the_checkpoint_ends_the_text(serve, end):
    llm = await serve(says([*b"ok", end, *b"junk"]))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=50)))
    assert text_of(deltas) == "ok"
    assert deltas[-1].finish_reason == "stop"


async def test_ignore_eos_goes_on_but_keeps_the_callers_stop_ids(serve):
    llm = await serve(says([*b"ok", EOS, *b"more", ord("!"), *b"junk"]))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True, stop_token_ids=[ord("!")])))
    assert text_of(deltas) == "okmore"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ord("!"))


async def test_the_end_token_is_shown_only_when_asked_for(serve):
    llm = await serve(says("ok!"))
    params = SamplingParams(max_tokens=50, stop_token_ids=[ord("!")], include_stop_str_in_output=True)
    assert text_of(await read(llm.open(PROMPT, params))) == "ok!"
    llm = await serve(says([*b"ok", EOS]))
    shown = SamplingParams(max_tokens=50, skip_special_tokens=False)
    assert text_of(await read(llm.open(PROMPT, shown))) == "ok"
    both = SamplingParams(max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=True)
    assert text_of(await read(llm.open(PROMPT, both))) == "ok<|eos|>"


async def test_no_half_characters_are_shown(serve):
    llm = await serve(says("ď🔥"))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=50)))
    assert text_of(deltas) == "ď🔥"
    assert not any("\ufffd" in delta.text for delta in deltas)
    cut = await read(llm.open(PROMPT, SamplingParams(max_tokens=4)))
    assert text_of(cut) == "ď\ufffd"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_a_stop_string_is_never_shown_and_frees_the_engine(serve, tokens_per_step):
    llm = await serve(says("abcSTOPdef" + "x" * 900), tokens_per_step=tokens_per_step, step_s=0.002)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=1000, stop="STOP", logprobs=0))
    deltas = await read(generation)
    assert text_of(deltas) == "abc"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")
    assert tokens_of(deltas) == list(b"abcSTOP")
    assert sum(len(delta.logprobs) for delta in deltas) == 7
    assert generation.completion_tokens == 7
    assert generation.finished
    await settle(llm, running=0, kv_used=0, aborted=1)


async def test_held_back_text_is_released_at_the_end(serve):
    llm = await serve(says("DEFGHIJ"))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=50, stop=["DEFXYZ", "HIJK"])))
    assert text_of(deltas) == "DEFGHIJ"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


async def test_stop_string_across_everything_shows_nothing(serve):
    llm = await serve(says("DEFGHIJ"))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=50, stop=["DEFGHIJ"])))
    assert text_of(deltas) == ""
    assert deltas[-1].finish_reason == "stop"
    shown = await read(llm.open(PROMPT, SamplingParams(max_tokens=50, stop="F", include_stop_str_in_output=True)))
    assert text_of(shown) == "DEF"


async def test_stop_strings_count_only_after_min_tokens(serve):
    llm = await serve(says("aXbXcXd"))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=50, min_tokens=4, stop="X")))
    assert text_of(deltas) == "aXbXc"


async def test_a_stop_string_in_the_flushed_tail_counts(serve):
    llm = await serve(says(b"a\xf0"))
    deltas = await read(llm.open(PROMPT, SamplingParams(max_tokens=2, stop="\ufffd")))
    assert text_of(deltas) == "a"
    assert deltas[-1].finish_reason == "stop"


async def test_n_answers_all_end_exactly_once(serve):
    lengths = iter([3, 9, 1, 20, 7, 2, 15, 4])
    llm = await serve(lambda request: [97] * next(lengths))
    generation = llm.open(PROMPT, SamplingParams(n=8, max_tokens=32))
    deltas = await read(generation)
    ends = [delta.index for delta in deltas if delta.finish_reason]
    assert sorted(ends) == list(range(8))
    assert [len(text_of(deltas, index)) for index in range(8)] == [3, 9, 1, 20, 7, 2, 15, 4]
    assert generation.completion_tokens == 61 + 8


async def test_n_answers_have_their_own_seeds(serve):
    seeds = []
    llm = await serve(lambda request: seeds.append(request.seed) or [97])
    await read(llm.open(PROMPT, SamplingParams(n=4, seed=7)))
    assert len(set(seeds)) == 4
    await read(llm.open(PROMPT, SamplingParams(n=1, seed=7)))
    assert seeds[4] == seeds[0]
    await read(llm.open(PROMPT, SamplingParams()))
    await read(llm.open(PROMPT, SamplingParams()))
    assert len(set(seeds[4:])) == 3


async def test_two_live_requests_may_share_a_name(serve):
    llm = await serve(lambda request: [request.prompt[0]] * 20)
    first = llm.open(PROMPT[:1], SamplingParams(max_tokens=5), request_id="same")
    second = llm.open(type(PROMPT)("I", [65]), SamplingParams(max_tokens=5), request_id="same")
    one, two = await asyncio.gather(read(first), read(second))
    assert (text_of(one), text_of(two)) == ("1" * 5, "A" * 5)


async def test_what_piles_up_is_merged_in_turns(serve):
    llm = await serve(says("x" * 1000))
    generation = llm.open(PROMPT, SamplingParams(max_tokens=2000, logprobs=2, stop=["y" * 50]))
    await settle(llm, finished=1)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(others())
    deltas = await read(generation)
    ticking.cancel()
    assert len(deltas) == 8
    assert turns >= 7, "a late reader must let others run between its pieces"
    assert text_of(deltas) == "x" * 1000
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


async def test_cancel_is_immediate_and_idempotent(serve):
    llm = await serve(says("x" * 4000), step_s=0.002)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=None, n=2))
    first = await anext(generation)
    assert first.text
    generation.cancel()
    generation.cancel()
    rest = await asyncio.wait_for(read(generation), 0.2)
    assert sorted(delta.index for delta in rest if delta.finish_reason == "abort") == [0, 1]
    await settle(llm, running=0, waiting=0, kv_used=0, aborted=2)


async def test_cancel_wakes_a_waiting_consumer(serve):
    llm = await serve(says("x"), freeze_after=0)
    generation = llm.open(PROMPT, SamplingParams())
    reader = asyncio.create_task(read(generation))
    await asyncio.sleep(0.02)
    generation.cancel()
    deltas = await asyncio.wait_for(reader, 0.5)
    assert [delta.finish_reason for delta in deltas] == ["abort"]


async def test_a_queued_request_that_is_cancelled_never_starts(serve):
    started = []
    llm = await serve(lambda request: started.append(request.id) or [97] * 4000, max_num_seqs=1, step_s=0.002)
    running = llm.open(PROMPT, SamplingParams(max_tokens=None))
    await anext(running)
    queued = llm.open(PROMPT, SamplingParams(max_tokens=None))
    await settle(llm, running=1, waiting=1)
    before = llm.stats.prompt_tokens
    queued.cancel()
    await settle(llm, running=1, waiting=0, aborted=1)
    running.cancel()
    await settle(llm, running=0, aborted=2)
    assert llm.stats.prompt_tokens == before


async def test_a_normal_end_sends_no_abort(serve):
    llm = await serve(says("hi"))
    generation = llm.open(PROMPT, SamplingParams())
    await read(generation)
    generation.cancel()
    await settle(llm, finished=1)
    await asyncio.sleep(0.15)  # a heartbeat later
    assert llm.stats.aborted == 0
    assert llm._engine.link.live == 0


async def test_a_failed_request_gives_its_text_and_then_the_reason(serve):
    llm = await serve(says([97, 98, 99, Fault("non-finite logits")]))
    seen = []
    with pytest.raises(GenerationFailed, match="non-finite logits"):
        await read(llm.open(PROMPT, SamplingParams()), seen)
    assert text_of(seen) == "abc"
    assert not llm.errored
    await settle(llm, running=0, failed=1)


async def test_one_failed_answer_ends_the_others(serve):
    scripts = iter([[97] * 4000, [97, Fault("boom")]])
    llm = await serve(lambda request: next(scripts), step_s=0.002)
    with pytest.raises(GenerationFailed, match="boom"):
        await read(llm.open(PROMPT, SamplingParams(n=2, max_tokens=None)))
    await settle(llm, running=0, kv_used=0, failed=1, aborted=1)


async def test_the_engines_refusal_reaches_the_caller(serve):
    llm = await serve(says("x"), kv_blocks=2)
    with pytest.raises(InvalidRequest, match="3 KV blocks and the engine has 2") as caught:
        await read(llm.open(PROMPT, SamplingParams(max_tokens=40)))
    assert caught.value.code == "kv_capacity_exceeded"


@pytest.mark.parametrize("silent", [True, False])
async def test_engine_death_is_told_to_everyone(serve, silent):
    def script(request):
        return [97, 98, Fault("out of memory", fatal=True, silent=silent)] if request.prompt[0] == 65 else [99] * 4000

    llm = await serve(script, step_s=0.002)
    bystander = asyncio.create_task(read(llm.open(PROMPT, SamplingParams(max_tokens=None))))
    seen = []
    with pytest.raises(EngineDead, match="out of memory" if not silent else "closed"):
        await read(llm.open(type(PROMPT)("I", [65]), SamplingParams()), seen)
    assert text_of(seen) == "ab"
    with pytest.raises(EngineDead):
        await asyncio.wait_for(bystander, 1)
    assert llm.errored
    assert not llm.is_running
    with pytest.raises(EngineDead):
        llm.open(PROMPT, SamplingParams())
    assert llm.progress().state == "dead"
    assert llm.metrics.stats.running == 0


async def test_a_second_consumer_is_refused(serve):
    llm = await serve(says("x"), freeze_after=0)
    generation = llm.open(PROMPT, SamplingParams())
    first = asyncio.create_task(read(generation))
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="consumer"):
        await anext(generation)
    generation.cancel()
    await first


async def test_a_cancelled_wait_loses_nothing(serve):
    llm = await serve(says("hello"), step_s=0.01)
    generation = llm.open(PROMPT, SamplingParams())
    seen = []
    while True:
        try:
            seen.append(await asyncio.wait_for(anext(generation), 0.003))
        except TimeoutError:
            continue
        except StopAsyncIteration:
            break
    assert text_of(seen) == "hello"


async def test_the_timeline_has_every_stage_in_order(serve):
    llm = await serve(says("hello"), step_s=0.002, cached_tokens=2)
    generation = llm.open(PROMPT, SamplingParams())
    await anext(generation)
    assert generation.cached_tokens == 2
    await read(generation)
    marks = [Mark.TOKENIZED, Mark.ARRIVED, Mark.SCHEDULED, Mark.FIRST_TOKEN, Mark.FINISHED, Mark.DELIVERED]
    assert generation.timeline.marks == [*marks, Mark.DETOKENIZED]
    assert generation.timeline.times == sorted(generation.timeline.times)
    account = generation.timings()
    assert account["decode_ms"] >= 4 * 2
    assert account["unaccounted_ms"] == 0
    assert account["cached_tokens"]["device"] == 2


async def test_a_stop_string_leaves_a_whole_timeline(serve):
    llm = await serve(says("aXb"), step_s=0.002)
    generation = llm.open(PROMPT, SamplingParams(stop="X"))
    await read(generation)
    assert Mark.FIRST_TOKEN in generation.timeline.marks
    assert generation.timeline.marks[-3:] == [Mark.FINISHED, Mark.DELIVERED, Mark.DETOKENIZED]
    assert generation.timings()["unaccounted_ms"] == 0


async def test_metrics_count_each_request_and_each_gap_once(serve):
    llm = await serve(says("hello"), tokens_per_step=2)
    await read(llm.open(PROMPT, SamplingParams(n=2)))
    assert _count(llm, "firsttoken_time_to_first_token_seconds") == 1
    assert _count(llm, "firsttoken_inter_token_latency_seconds") == 2 * (6 - 1)
    assert _count(llm, "firsttoken_request_duration_seconds") == 1
    generation = llm.open(PROMPT, SamplingParams())
    generation.cancel()
    assert _count(llm, "firsttoken_request_duration_seconds") == 1, "who left got no whole answer"


def _count(llm, name: str) -> float:
    return llm.metrics.registry.get_sample_value(f"{name}_count", P2)


async def test_a_model_without_a_tokenizer_gives_tokens_and_no_text(serve):
    llm = await serve(says("hello"), text=False)
    deltas = await read(llm.open(PROMPT, SamplingParams()))
    assert text_of(deltas) == ""
    assert tokens_of(deltas) == [*b"hello", EOS]
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.open(PROMPT, SamplingParams(stop="x"))


@pytest.mark.parametrize("look", ["next", "cancel", "timings", "cached_tokens"])
async def test_the_books_wait_until_the_consumer_has_passed_on_his_token(serve, look):
    llm = await serve(says("x" * 4000), step_s=0.005, cached_tokens=2)

    def first_tokens():
        return llm.metrics.registry.get_sample_value("firsttoken_time_to_first_token_seconds_count", P2)

    generation = llm.open(PROMPT, SamplingParams(max_tokens=4000))
    assert set((await anext(generation)).text) == {"x"}
    assert first_tokens() == 0
    if look == "next":
        await anext(generation)
    elif look == "cancel":
        generation.cancel()
    elif look == "timings":
        assert generation.timings()["prefill_ms"] > 0
    else:
        assert generation.cached_tokens == 2
    assert first_tokens() == 1
    generation.cancel()
    assert first_tokens() == 1


async def test_the_last_delta_comes_with_the_books_in_order(serve):
    llm = await serve(says("ab"), tokens_per_step=3)
    generation = llm.open(PROMPT, SamplingParams(max_tokens=50))
    assert (await anext(generation)).finish_reason == "stop"
    assert llm.metrics.registry.get_sample_value("firsttoken_time_to_first_token_seconds_count", P2) == 1
    assert generation.timeline.first(Mark.FIRST_TOKEN) is not None
    generation.cancel()
