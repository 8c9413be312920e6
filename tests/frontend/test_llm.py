"""The synchronous front end."""

from __future__ import annotations

import asyncio
import threading
from array import array

import numpy as np
import pytest

from firsttoken.core.errors import EngineDead, InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.stub import Fault, Script, StubConfig, StubEngine, StubProcess
from firsttoken.frontend.failures import GenerationFailed
from firsttoken.frontend.llm import LLM
from firsttoken.text.chat_template import ChatTemplate
from tests.support.byte_tokenizer import GENERATION, TEMPLATE, VOCAB_SIZE
from tests.support.stub_llm import says


def echo(request):
    return list(array("I", request.prompt))


@pytest.fixture
def make(tokenizer):
    made = []

    def build(script: Script, *, text: bool = True, **options: object) -> LLM:
        engine = StubEngine(script, StubConfig(vocab_size=VOCAB_SIZE), **options)
        made.append(
            LLM.from_handle(
                engine,
                tokenizer=tokenizer if text else None,
                chat_template=ChatTemplate(TEMPLATE) if text else None,
                generation_config=GENERATION,
            )
        )
        return made[-1]

    yield build
    for llm in made:
        llm.close()


def test_options_that_are_not_known_are_refused_by_name_before_anything_is_loaded():
    with pytest.raises(TypeError, match=r"LLM has no option 'gpu_memory_utilization' \(vLLM's option: --kv-memory"):
        LLM("no/such-model", gpu_memory_utilization=0.9)
    with pytest.raises(TypeError, match=r"LLM has no option 'threds'$"):
        LLM("no/such-model", threds=2)


def test_outputs_come_in_the_order_of_the_prompts(make):
    llm = make(echo, max_num_seqs=3)
    prompts = ["x" * count for count in (9, 1, 5, 30, 2, 7)]
    got = llm.generate(prompts, SamplingParams(max_tokens=100))
    assert [output.outputs[0].text for output in got] == prompts
    assert [output.request_id for output in got] == list("012345")
    assert all(output.finished for output in got)
    assert got[0].metrics["decode_ms"] >= 0
    assert got[0].metrics["unaccounted_ms"] == 0


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        ([[97], [98]], ["a", "b"]),
        ({"prompt": "ab"}, ["ab"]),
        ([{"prompt_token_ids": [97]}, "b"], ["a", "b"]),
        ([], []),
        ((prompt for prompt in ("a", "b")), ["a", "b"]),
        (np.array([97, 98]), ["ab"]),
        ([np.array([97]), np.array([98], dtype=np.uint32)], ["a", "b"]),
    ],
)
def test_every_form_of_prompt_is_taken(make, prompts, texts):
    assert [output.outputs[0].text for output in make(echo).generate(prompts, SamplingParams())] == texts


@pytest.mark.parametrize("prompts", [None, 5, b"ab", [None], ["a", 1.5], np.array([0.5])])
def test_what_is_no_prompt_is_refused(make, prompts):
    with pytest.raises(InvalidRequest):
        make(echo).generate(prompts, SamplingParams())


@pytest.mark.parametrize("params", [[None], [{"temperature": 0}], {"temperature": 0}])
def test_what_are_no_sampling_params_is_refused(make, params):
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        make(echo).generate("a", params)


def test_params_for_each_prompt_and_defaults(make):
    llm = make(echo)
    got = llm.generate(["abcdef", "abcdef"], [SamplingParams(max_tokens=2), SamplingParams(n=2, stop="d")])
    assert [[answer.text for answer in output.outputs] for output in got] == [["ab"], ["abc", "abc"]]
    assert len(llm.generate("y" * 20)[0].outputs[0].token_ids) == 16
    with pytest.raises(InvalidRequest, match="2 sampling parameters for 1 prompts"):
        llm.generate(["a"], [SamplingParams()] * 2)


def test_stop_string_frees_the_engine(make):
    llm = make(says("abXc" + "d" * 900), step_s=0.001)
    answer = llm.generate("p", SamplingParams(max_tokens=1000, stop="X"))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "X")
    assert llm.generate("p", SamplingParams(max_tokens=1))[0].outputs[0].text == "a"
    assert llm.stats.aborted == 1


def test_chat_uses_the_template(make):
    llm = make(echo)
    message = {"role": "user", "content": "Hi"}
    long = SamplingParams(max_tokens=100)
    assert llm.chat([message], long)[0].outputs[0].text == "<user>Hi\n<assistant>"
    two = llm.chat([[message], [message]], long, add_generation_prompt=False)
    assert [output.outputs[0].text for output in two] == ["<user>Hi\n"] * 2
    assert two[0].metrics["unaccounted_ms"] == 0


def test_one_bad_prompt_stops_the_call_before_any_work(make):
    llm = make(echo)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        llm.generate([[97], [9999]], SamplingParams())
    assert llm.stats.prompt_tokens == 0


def test_a_refusal_or_failure_names_its_prompt_and_leaves_nothing(make):
    llm = make(lambda request: [97, Fault("bad logits")] if request.prompt[0] == 98 else [97] * 900, step_s=0.001)
    with pytest.raises(GenerationFailed, match="prompt 1: bad logits"):
        llm.generate(["a", "b"], SamplingParams(max_tokens=1000))
    llm.generate("b", SamplingParams(max_tokens=1))
    assert (llm.stats.running, llm.stats.aborted, llm._link.live) == (0, 1, 0)
    small = make(echo, kv_blocks=1)
    with pytest.raises(InvalidRequest, match=r"prompt 0: .*KV blocks"):
        small.generate(["abc"], SamplingParams(max_tokens=64))


def test_engine_death_is_raised(make):
    llm = make(says([97, Fault("gone", fatal=True)]))
    with pytest.raises(EngineDead, match="gone"):
        llm.generate("a", SamplingParams())
    with pytest.raises(EngineDead):
        llm.generate("a", SamplingParams())


def test_a_failed_start_is_raised(tokenizer):
    with pytest.raises(EngineDead, match="no room"):
        LLM.from_handle(StubEngine(echo, fail_start="no room"))


async def test_it_works_inside_a_running_event_loop(make):
    assert make(echo).generate("ab", SamplingParams())[0].outputs[0].text == "ab"
    await asyncio.sleep(0)


def test_two_threads_may_call_at_once(make):
    llm = make(echo, step_s=0.001)
    got = {}

    def call(name: str) -> None:
        got[name] = [output.outputs[0].text for output in llm.generate([name * 9] * 5, SamplingParams())]

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == {"a": ["a" * 9] * 5, "b": ["b" * 9] * 5}


def test_a_model_without_a_tokenizer_takes_ids(make):
    llm = make(echo, text=False)
    assert llm.generate([[97, 98]], SamplingParams())[0].outputs[0].token_ids[:2] == [97, 98]
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.generate("ab", SamplingParams())
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_progress_is_shown_on_request(make, capsys):
    make(echo).generate(["a", "b"], SamplingParams(), use_tqdm=True)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""


def test_closing_and_dropping_stop_the_engine(tokenizer):
    engine = StubEngine(echo, StubConfig(vocab_size=VOCAB_SIZE))
    with LLM.from_handle(engine, tokenizer=tokenizer) as llm:
        assert engine.alive()
    assert not engine.alive()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("a")
    dropped = StubEngine(echo, StubConfig(vocab_size=VOCAB_SIZE))
    llm = LLM.from_handle(dropped, tokenizer=tokenizer)
    del llm
    assert not dropped.alive()


def test_an_engine_process_serves_the_synchronous_api_too(tokenizer):
    engine = StubProcess(f"{__name__}:echo", vocab_size=VOCAB_SIZE)
    with LLM.from_handle(engine, tokenizer=tokenizer, generation_config=GENERATION) as llm:
        assert llm.generate("ab", SamplingParams())[0].outputs[0].text == "ab"
        engine.kill()
        with pytest.raises(EngineDead):
            llm.generate("ab", SamplingParams())
