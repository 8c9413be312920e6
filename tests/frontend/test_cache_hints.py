"""Cache hints in the Python API, and what its outputs tell of the cache."""

from __future__ import annotations

import pytest

from firsttoken import LLM, SamplingParams
from firsttoken.core.cache_hint import CacheHint
from firsttoken.core.cache_miss import Miss, MissReason
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.retention import NotKept, Retention
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.engine.stub import StubEngine
from firsttoken.frontend.times import RequestTimes
from firsttoken.transport.messages import RequestDelta
from tests.support.byte_tokenizer import VOCAB_SIZE

ONE = SamplingParams(max_tokens=1)
SECOND = 10**9
TINY = {"max_model_len": 512, "threads": 1, "quantization": "none", "dtype": "float32"}


@pytest.fixture
def engine():
    seen = []

    def script(request):
        seen.append(request.retention)
        return [97]

    stub = StubEngine(script, vocab_size=VOCAB_SIZE, max_num_seqs=1)
    stub.seen = seen
    return stub


def test_one_hint_for_all_prompts_or_one_for_each(engine, tokenizer):
    with LLM.from_handle(engine, tokenizer=tokenizer) as llm:
        llm.generate([[1], [2]], ONE)
        outputs = llm.generate([[1], [2]], ONE, cache_hint={"ttl_s": 2})
        assert [output.metrics["kept"] for output in outputs] == [True, True]
        llm.generate([[1], [2]], ONE, cache_hint=[CacheHint(priority="p1"), None])
        for wrong in ({"ttl": 2}, [{"ttl_s": 2}], "60", {"ttl_s": -1}, [None, {"until": "x"}]):
            with pytest.raises(InvalidRequest) as caught:
                llm.generate([[1], [2]], ONE, cache_hint=wrong)
            assert caught.value.param.startswith("cache_hint")
    two = Retention(2 * SECOND)
    assert engine.seen == [None, None, two, two, Retention(0, 1), None]


async def test_a_hint_of_the_asynchronous_api(serve):
    seen = []

    def script(request):
        seen.append(request.retention)
        return [97]

    llm = await serve(script)
    outputs = [output async for output in llm.generate([1], ONE, cache_hint={"until": "tool_result"})]
    assert outputs[-1].metrics["kept"] is True
    with pytest.raises(InvalidRequest, match=r"cache_hint\.until"):
        async for _ in llm.generate([1], ONE, cache_hint={"until": "x"}):
            pass
    assert seen == [Retention(60 * SECOND, None, True)]


def test_a_real_engine_keeps_and_says_what_it_found():
    prompt = list(range(1, 101))
    with LLM("random:tiny-llama", **TINY) as llm:
        assert llm.generate([prompt], ONE, cache_hint={"ttl_s": 60})[0].metrics["kept"] is True
        [output] = llm.generate([prompt], ONE)
        assert output.num_cached_tokens == 96
        assert output.metrics["cached_tokens"] == {"device": 96, "host": 0, "disk": 0}
        assert output.metrics["kept"] is None


@pytest.mark.parametrize("ended_here", [True, False])
def test_what_was_found_is_told_though_a_stop_string_ends_the_answer(ended_here):
    times = RequestTimes(Timeline([(Mark.TOKENIZED, 1)]))
    miss = Miss(48, MissReason.NEVER_SEEN)
    found = {"cached_tokens": 48, "cached_host": 16, "cached_disk": 8, "miss": miss}
    times.note_at_once(RequestDelta(1, [5], stamps=[(Mark.ARRIVED, 2)], **found), 3)
    times.note_at_once(RequestDelta(1, [6], cached_tokens=48), 4)
    if not ended_here:
        times.note_at_once(
            RequestDelta(1, [7], finish_reason="stop", kept=False, kept_reason=NotKept.QUOTA, **found), 5
        )
    times.finish(6)
    account = times.timings()
    assert account["cached_tokens"] == {"device": 24, "host": 16, "disk": 8}
    assert account["miss"]["reason"] == "never_seen"
    assert account["kept"] is (None if ended_here else False)
    assert account["kept_reason"] == (None if ended_here else "quota")
