"""What is refused before it reaches the engine, and how."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass, Terms
from firsttoken.frontend.admission import Admission, token_ids
from firsttoken.frontend.outputs import default_params
from firsttoken.frontend.prompts import split_prompt, split_prompts
from firsttoken.transport.messages import ENCODER, EngineInfo, Submit

INFO = EngineInfo(
    model="m",
    max_model_len=32,
    vocab_size=100,
    max_num_seqs=4,
    kv_blocks=8,
    block_tokens=16,
    bytes_per_block=1,
    device="cpu",
    dtype="float32",
    quantization="none",
    kv_dtype="float32",
)


def door(*eos: int, has_tokenizer: bool = True, seed: int | None = 0) -> Admission:
    return Admission(INFO, GenerationConfig(eos_token_ids=eos), has_tokenizer=has_tokenizer, seed=seed)


def ids(*tokens: int) -> array:
    return array("I", tokens)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "says"),
    [
        (ids(), {}, "prompt", "empty"),
        (ids(1, 100), {}, "prompt", r"100 is outside the vocabulary \(0 to 99\)"),
        (ids(4_000_000_000), {}, "prompt", "outside the vocabulary"),
        (ids(*[1] * 32), {}, "prompt", "32 tokens.*at most 31"),
        (ids(1), {"stop_token_ids": [100]}, "stop_token_ids", "100"),
        (ids(1), {"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        (ids(1), {"logit_bias": {99999999: -100.0}}, "logit_bias", "99999999"),
        (ids(1), {"min_tokens": 32, "max_tokens": None}, "min_tokens", "31 tokens"),
        (ids(1), {"stop": "x", "detokenize": False}, "stop", "detokenize is off"),
        (ids(1), {"stop": "\ud800"}, "stop", "surrogate"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(prompt, params, param, says):
    with pytest.raises(InvalidRequest, match=says) as caught:
        door().admit(prompt, SamplingParams(**params))
    assert caught.value.param == param


@pytest.mark.parametrize("length", [1, 1024, 1025, 4000])
def test_an_unknown_token_is_found_in_prompts_of_any_length(length):
    info = msgspec.structs.replace(INFO, max_model_len=4096)
    admission = Admission(info, GenerationConfig(), has_tokenizer=True)
    assert admission.admit(ids(*[99] * length), SamplingParams())
    with pytest.raises(InvalidRequest, match="100 is outside"):
        admission.admit(ids(*[99] * (length - 1), 100), SamplingParams())


def test_salt_and_priority_must_be_sendable():
    with pytest.raises(InvalidRequest, match="surrogate"):
        door().admit(ids(1), SamplingParams(), terms=Terms(salt="\udc00"))
    with pytest.raises(InvalidRequest, match="priority"):
        door().admit(ids(1), SamplingParams(), terms=Terms(priority=2**63))


@pytest.mark.parametrize("wrong", [[-1], [2**32], [1.0], ["1"], [True], [None]])
def test_what_is_not_a_token_id_is_refused(wrong):
    with pytest.raises(InvalidRequest, match="position 0"):
        token_ids(wrong)


def test_ids_are_unique_and_the_wire_takes_everything():
    admission = door(5, 7, 5)
    terms = Terms(service=ServiceClass.P0, priority=-3, tenant="me", share=0.5, salt="é", deadline_ns=2**60)
    requests = admission.admit(ids(1, 2), SamplingParams(n=3, seed=-(2**63), stop="x"), terms=terms)
    assert {name: getattr(requests[2], name) for name in Terms.__struct_fields__} == msgspec.structs.asdict(terms)
    requests += admission.admit(ids(1, 2), SamplingParams(seed=2**63 - 1, stop_token_ids=[9, 7]))
    assert len({request.id for request in requests}) == 4
    assert requests[0].stop_ids == (5, 7)
    assert requests[3].stop_ids == (5, 7, 9)
    assert requests[0].prompt == ids(1, 2).tobytes()
    assert ENCODER.encode(Submit(requests))


def test_max_tokens_is_cut_to_the_room():
    assert door().admit(ids(1, 2), SamplingParams(max_tokens=None))[0].max_tokens == 30
    assert door().admit(ids(1, 2), SamplingParams(max_tokens=31))[0].max_tokens == 30
    assert door().admit(ids(1, 2), SamplingParams(max_tokens=3))[0].max_tokens == 3
    assert door().admit(ids(*[1] * 31), SamplingParams())[0].max_tokens == 1


def test_unseeded_requests_repeat_only_with_the_front_ends_seed():
    def seeds(seed):
        admission = door(seed=seed)
        return [admission.admit(ids(1), SamplingParams())[0].seed for _ in range(3)]

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)
    assert seeds(None) != seeds(None)
    assert len(set(seeds(1))) == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({}, "needs text"), ({"text": "a"}, "not text"), ({"prompt": 3}, "string"), (3, "int"), (b"x", "bytes")],
)
def test_a_prompt_of_no_known_form_is_refused(wrong, says):
    with pytest.raises(InvalidRequest, match=says):
        split_prompt(wrong)


def test_prompts_are_told_from_lists_of_prompts():
    assert split_prompts("ab") == ["ab"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], [2]]) == [[1], [2]]
    assert split_prompts(["a", {"prompt": "b"}]) == ["a", {"prompt": "b"}]
    assert split_prompts({"prompt_token_ids": [1]}) == [{"prompt_token_ids": [1]}]
    assert split_prompts([]) == []


def test_defaults_come_from_the_checkpoint():
    params = default_params(GenerationConfig(temperature=0.6, top_k=20))
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 16)
    assert default_params(GenerationConfig()) == SamplingParams()
