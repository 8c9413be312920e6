"""Classes and deadlines in the Python API."""

from __future__ import annotations

from pathlib import Path

import pytest

from firsttoken import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from firsttoken.core.errors import ConfigError, DeadlineExceeded, InvalidRequest
from firsttoken.core.service import ClassTargets, ServiceClass, Targets, Terms
from firsttoken.engine.stub import Fault, StubEngine
from firsttoken.frontend.failures import GenerationFailed
from firsttoken.text.chat_template import ChatTemplate
from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.stub_llm import PROMPT, read, says

P0, P1, P2 = ServiceClass
TINY = {"max_model_len": 128, "threads": 1, "quantization": "none", "dtype": "float32"}


@pytest.fixture
def engine():
    """A stub that answers one token to each request, and keeps them."""
    seen = []

    def script(request):
        seen.append(request)
        return [97]

    stub = StubEngine(script, vocab_size=VOCAB_SIZE, max_num_seqs=1)
    stub.seen = seen
    return stub


def test_one_class_for_all_prompts_or_one_for_each(engine, tokenizer):
    params = SamplingParams(max_tokens=1)
    with LLM.from_handle(engine, tokenizer=tokenizer) as llm:
        llm.generate([[1], [2]], params)
        llm.generate([[1], [2]], params, service_class="p0")
        llm.generate([[1], [2]], params, service_class=["p1", "p0"])
        for wrong in ("gold", ["p0"], ["p0", "p3"]):
            with pytest.raises(InvalidRequest) as caught:
                llm.generate([[1], [2]], params, service_class=wrong)
            assert caught.value.param == "service_class"
    assert [request.service for request in engine.seen] == [P2, P2, P0, P0, P1, P0]


def test_one_priority_for_all_prompts_or_one_for_each(engine, tokenizer):
    params = SamplingParams(max_tokens=1)
    with LLM.from_handle(engine, tokenizer=tokenizer) as llm:
        llm.generate([[1], [2]], params)
        llm.generate([[1], [2]], params, priority=None)
        llm.generate([[1], [2]], params, priority=-3)
        llm.generate([[1], [2]], params, priority=[5, 0])
        for wrong in ([1], [1, 2, 3], [1, "2"], [1, None], [1.0, 2], 1.5, "ab", True, 2**63):
            with pytest.raises(InvalidRequest) as caught:
                llm.generate([[1], [2]], params, priority=wrong)
            assert caught.value.param == "priority"
    assert [request.priority for request in engine.seen] == [0, 0, 0, 0, -3, -3, 5, 0]


def test_a_conversation_has_its_priority_too(engine, tokenizer):
    talk = [{"role": "user", "content": "hi"}]
    with LLM.from_handle(engine, tokenizer=tokenizer, chat_template=ChatTemplate("{{ messages[0].content }}")) as llm:
        llm.chat([talk, talk], SamplingParams(max_tokens=1), priority=[2, -1])
    assert [request.priority for request in engine.seen] == [2, -1]


async def test_a_generated_stream_has_its_class_and_deadline(serve, engine):
    llm = await serve(None, engine=engine)
    params = SamplingParams(max_tokens=1)
    async for _ in llm.generate([1], params, service_class="p1", priority=4, deadline_ms=60_000):
        pass
    async for _ in llm.generate([1], params):
        pass
    first, second = engine.seen
    assert (first.service, first.priority) == (P1, 4)
    assert first.deadline_ns - first.stamps[0][1] == 60_000_000_000
    assert (second.service, second.priority, second.deadline_ns) == (P2, 0, 0)
    for wrong in ({"service_class": "P0"}, {"deadline_ms": 0}, {"deadline_ms": float("nan")}):
        with pytest.raises(InvalidRequest) as caught:
            await anext(llm.generate([1], params, **wrong))
        assert caught.value.param in wrong


async def test_what_never_started_raises_of_its_own(serve):
    llm = await serve(says([Fault("it came too late", DeadlineExceeded.code)]))
    with pytest.raises(DeadlineExceeded, match="it came too late"):
        await read(llm.open(PROMPT, SamplingParams(n=2)))
    value = llm.metrics.registry.get_sample_value
    ended = [
        value("firsttoken_requests_ended_total", {"outcome": outcome, "service_class": "p2"})
        for outcome in ("expired", "failed", "aborted")
    ]
    assert ended == [2, 0, 0]
    assert value("firsttoken_request_duration_seconds_count", {"service_class": "p2"}) == 0


async def test_an_error_is_known_by_its_code_not_by_its_words(serve):
    llm = await serve(says([Fault("deadline handling broke")]))
    with pytest.raises(GenerationFailed, match="deadline handling broke"):
        await read(llm.open(PROMPT, SamplingParams()))


def test_a_batch_names_the_prompt_that_never_started(tokenizer):
    engine = StubEngine(says([Fault("too late", DeadlineExceeded.code)]), vocab_size=VOCAB_SIZE)
    with (
        LLM.from_handle(engine, tokenizer=tokenizer) as llm,
        pytest.raises(DeadlineExceeded, match="prompt 0: too"),
    ):
        llm.generate([[1]])


async def test_each_class_has_its_own_series(serve):
    llm = await serve(says("abc"))
    await read(llm.open(PROMPT, SamplingParams(), terms=Terms(service=P0)))
    count = llm.metrics.registry.get_sample_value
    firsts = [count("firsttoken_time_to_first_token_seconds_count", {"service_class": name}) for name in ("p0", "p2")]
    assert firsts == [1, 0]


def test_a_real_engine_takes_targets_by_path(tmp_path: Path):
    file = tmp_path / "targets.toml"
    file.write_text('[class.p0]\nttft_p99 = "80ms"\n')
    with LLM("random:tiny-llama", targets=file, **TINY) as llm:
        outputs = llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3, ignore_eos=True), service_class=["p2", "p0"])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


async def test_a_real_engine_takes_targets_as_such():
    args = AsyncEngineArgs(model="random:tiny-llama", targets=Targets(p1=ClassTargets(ttft_p99=500.0)), **TINY)
    async with await AsyncLLM.launch(args) as llm:
        async for output in llm.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True), service_class="p1"):
            last = output
    assert len(last.outputs[0].token_ids) == 2


def test_targets_that_cannot_be_honoured_start_nothing(tmp_path: Path):
    file = tmp_path / "targets.toml"
    file.write_text("[class.p9]\n")
    for start in (lambda: LLM("random:tiny-llama", targets=str(file)), lambda: AsyncEngineArgs(targets=file)):
        with pytest.raises(ConfigError, match="unknown class 'p9'"):
            start()
