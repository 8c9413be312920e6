"""Answers that are held to grammars through the whole engine: a model of random weights writes what it is told."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema_rs
import pytest

from firsttoken import LLM, SamplingParams
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.service import ServiceClass, Terms
from firsttoken.frontend.async_llm import AsyncLLM
from tests.support.byte_tokenizer import EOS, EOT
from tests.support.tiny_folder import write_tiny_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PERSON = Grammar("json_schema", json.dumps(SCHEMA))
YEAR = Grammar("regex", "(in|about) [0-9]{4}( or so)?")
PROMPT = "Who is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_tiny_folder(tmp_path_factory.mktemp("grammar") / "tiny")
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, EOT]}))
    return str(made)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, quantization="none", dtype="float32", threads=1, max_model_len=256, kv_memory=1 << 18) as made:
        yield made


def valid(text: str) -> None:
    jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"top_p": 0.5, "repetition_penalty": 1.3, "presence_penalty": 1.0},
        {"logit_bias": dict.fromkeys(range(256), -100.0)},
        {"logit_bias": {ord(" "): 100.0, ord("\n"): 100.0}},
        {"min_tokens": 40},
        {"ignore_eos": True},
        {"top_k": 1, "logprobs": 5},
    ],
    ids=["random", "greedy", "penalties", "bias-on-all", "bias-on-blanks", "min-tokens", "ignore-eos", "logprobs"],
)
def test_whatever_chooses_the_tokens_the_document_is_valid_and_whole(llm, fields):
    params = SamplingParams(max_tokens=44, seed=3, n=2, grammar=PERSON, **fields)
    for answer in llm.generate([PROMPT], params)[0].outputs:
        valid(answer.text)
        assert answer.finish_reason == "stop"
        assert not re.search(r"\s\s", re.sub(r'"(\\.|[^"\\])*"', "", answer.text))
        for step in answer.logprobs or ():
            assert all(abs(one.logprob) < float("inf") for one in step.values())


@pytest.mark.parametrize("fields", [{"min_tokens": 40}, {"min_tokens": 44}, {"ignore_eos": True}])
def test_an_answer_that_cannot_go_on_ends_before_its_least_length(llm, fields):
    """It went on with end tokens, and where that took all that it might have it ended by "length"."""
    params = SamplingParams(max_tokens=44, grammar=Grammar("choice", '["yes", "no"]'), **fields)
    answer = llm.generate([PROMPT], params)[0].outputs[0]
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == len(answer.text) + 1


def test_many_at_once_say_what_each_says_alone(llm):
    grammars = [PERSON, YEAR, None, Grammar("choice", '["yes", "no"]'), Grammar("json_object")]
    asked = [
        SamplingParams(max_tokens=70, seed=seed, grammar=grammars[seed % len(grammars)], temperature=0.9)
        for seed in range(15)
    ]
    together = [output.outputs[0] for output in llm.generate([PROMPT] * len(asked), asked)]
    alone = [llm.generate([PROMPT], [params])[0].outputs[0] for params in asked]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert all(re.fullmatch(YEAR.source, one.text) for one in together[1::5])
    assert {one.text for one in together[3::5]} <= {"yes", "no"}


def test_too_few_tokens_are_refused_with_the_number_that_does(llm):
    with pytest.raises(InvalidRequest, match="allow at least") as refused:
        llm.generate([PROMPT], SamplingParams(max_tokens=5, grammar=PERSON))
    assert refused.value.param == "max_tokens"
    least = int(re.search(r"at least (\d+)", refused.value.message)[1])
    answer = llm.generate([PROMPT], SamplingParams(max_tokens=least, grammar=PERSON))[0].outputs[0]
    valid(answer.text)
    assert len(answer.token_ids) <= least
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llm.generate([PROMPT], SamplingParams(grammar=Grammar("json_schema", '{"type":"array","uniqueItems":true}')))


async def test_a_request_waits_for_its_grammar_alone_and_is_held_to_it_after_a_preemption_too(folder):
    args = EngineArgs(model=folder, quantization="none", dtype="float32", threads=1, max_num_seqs=1)
    llm = await AsyncLLM.launch(args, in_process=True)
    try:
        prompt = await llm.tokenize(PROMPT)
        params = SamplingParams(max_tokens=60, grammar=PERSON, seed=7)
        left = llm.open(prompt, params)
        waits = llm.open(prompt, params)
        passes = llm.open(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        left.cancel()
        async with asyncio.timeout(30):
            assert [delta.finish_reason async for delta in left] == ["abort"]
            deltas = [delta async for delta in passes]
            assert deltas[-1].finish_reason == "length"
            said = "".join([delta.text async for delta in waits])
        valid(said)
        reasons = waits.timings()["queue_reasons"]
        assert reasons["grammar"] > 0
        assert sum(reasons.values()) == pytest.approx(waits.timings()["queue_ms"], abs=0.01)
        again = llm.open(prompt, params)
        begun = (await anext(again)).text
        urgent = llm.open(prompt, params, terms=Terms(service=ServiceClass.P0))  # it takes the only slot
        assert "".join([delta.text async for delta in urgent]) == said
        assert begun + "".join([delta.text async for delta in again]) == said
        assert again.timings()["preemptions"] > 0
        assert again.timings()["queue_reasons"]["grammar"] == 0  # it is known now
    finally:
        await llm.shutdown()
