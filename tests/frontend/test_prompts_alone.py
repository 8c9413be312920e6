"""Vectors, scores and log-probabilities of prompts in the Python API."""

from __future__ import annotations

import pytest

from firsttoken import LLM, AsyncLLM, PoolingParams, SamplingParams
from firsttoken.core.errors import InvalidRequest
from firsttoken.engine.stub import StubEngine
from tests.support.stub_llm import says


@pytest.fixture
def llm():
    with LLM.from_handle(StubEngine(says("ab"), max_model_len=32)) as made:
        yield made


def test_vectors_come_in_the_order_of_their_prompts(llm):
    found = llm.embed([[1, 2, 3], {"prompt_token_ids": [7]}])
    assert [one.outputs.embedding.index(1.0) for one in found] == [3, 7]
    assert [one.prompt_token_ids for one in found] == [[1, 2, 3], [7]]
    assert llm.embed([5], pooling_params=PoolingParams(dimensions=6))[0].outputs.embedding == [0, 0, 0, 0, 0, 1]
    [encoded] = llm.encode([[4]])
    assert (encoded.outputs.data.shape, encoded.outputs.data.dtype) == ((8,), "float32")


def test_scores_are_cosines(llm):
    assert [one.outputs.score for one in llm.score([3], [[3], [11], [4]])] == pytest.approx([1, 1, 0])
    with pytest.raises(InvalidRequest, match="2 prompts and data_2 3"):
        llm.score([[1], [2]], [[1], [2], [3]])


def test_what_does_not_fit_is_refused_or_cut(llm):
    with pytest.raises(InvalidRequest, match="33 tokens"):
        llm.embed([list(range(33))])
    assert llm.embed([list(range(33))], truncate_prompt_tokens=-1)[0].prompt_token_ids == list(range(1, 33))
    with pytest.raises(InvalidRequest, match=r"dimensions must be in \[1, 8\]"):
        llm.embed([1], pooling_params=PoolingParams(dimensions=9))
    with pytest.raises(InvalidRequest, match="pooling_task 'classify'"):
        llm.encode([1], pooling_task="classify")


PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=1, truncate_prompt_tokens=2)


def check(output):
    assert output.prompt_token_ids == [6, 7]
    first, second = output.prompt_logprobs
    assert first is None
    assert (second[7].logprob, second[7].rank) == (-0.5, 1)


def test_a_prompts_log_probabilities_are_in_its_output(llm):
    [output] = llm.generate([[5, 6, 7]], PARAMS)
    check(output)
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=0))[0].outputs[0].token_ids == []


async def test_they_are_in_those_of_the_asynchronous_one():
    llm = AsyncLLM(StubEngine(says("ab")))
    await llm.start()
    try:
        outputs = [output async for output in llm.generate([5, 6, 7], PARAMS)]
    finally:
        await llm.shutdown()
    check(outputs[-1])


async def test_the_asynchronous_one_has_the_same_calls_and_says_the_same(llm):
    others = AsyncLLM(StubEngine(says("ab"), max_model_len=32))
    await others.start()
    try:
        prompts = [[token] for token in range(1, 30)]  # more than run at once
        assert await others.embed(prompts) == llm.embed(prompts)
        small = PoolingParams(dimensions=6)
        assert await others.embed([5], pooling_params=small) == llm.embed([5], pooling_params=small)
        [one], [other] = await others.encode([[4]]), llm.encode([[4]])
        assert one.outputs.data.tolist() == other.outputs.data.tolist()
        assert await others.score([3], [[3], [11], [4]]) == llm.score([3], [[3], [11], [4]])
        assert await others.embed([list(range(33))], truncate_prompt_tokens=-1) == llm.embed(
            [list(range(33))], truncate_prompt_tokens=-1
        )
        assert await others.embed([]) == llm.embed([]) == []
        for refused, names in (
            (others.score([[1], [2]], [[1], [2], [3]]), "2 prompts and data_2 3"),
            (others.embed([1], pooling_params=PoolingParams(dimensions=9)), r"dimensions must be in \[1, 8\]"),
            (others.encode([1], pooling_task="classify"), "pooling_task 'classify'"),
            (others.embed([[1], list(range(33))]), "33 tokens"),
        ):
            with pytest.raises(InvalidRequest, match=names):
                await refused
        assert others.stats.running == 0
    finally:
        await others.shutdown()
