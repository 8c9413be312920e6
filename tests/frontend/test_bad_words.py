"""Words that answers must not hold, and tokens that they may: from the caller's fields to what the engine is sent."""

from __future__ import annotations

import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.stub import StubEngine
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.frontend.bad_words import spell
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.stub_llm import PROMPT, read


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_word_is_spelt_as_it_begins_a_text_and_behind_a_space(tokenizer):
    params = spell(SamplingParams(bad_words=["ab", " c"], bad_words_token_ids=[[5]]), tokenizer)
    assert params.bad_words_token_ids == ((5,), tuple(b"ab"), tuple(b" ab"), tuple(b"c"), tuple(b" c"))
    assert params.bad_words is None
    plain = SamplingParams()
    assert spell(plain, None) is plain
    with pytest.raises(InvalidRequest, match="need a tokenizer"):
        spell(SamplingParams(bad_words=["ab"]), None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": "ab"}, "list of texts"),
        ({"bad_words": ["a", " "]}, "not blank"),
        ({"bad_words": ["a"] * 65}, "at most 64 texts"),
        ({"bad_words_token_ids": [[]]}, "1 to 128 token ids"),
    ],
)
def test_what_is_wrong_is_said_at_once(fields, said):
    with pytest.raises(InvalidRequest, match=said):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": [1024]}, "allowed_token_ids: token id 1024 is outside"),
        ({"bad_words_token_ids": [[1, 1024]]}, "bad_words_token_ids: token id 1024"),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "leaves no token"),
        ({"allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]}, "leaves no token"),
        ({"min_tokens": 1, "stop_token_ids": [*range(1024)]}, "stop_token_ids leaves no token"),
        ({"min_tokens": 1, "stop_token_ids": [*range(1023)], "bad_words_token_ids": [[1023]]}, "leaves no token"),
        ({"bad_words": ["a"]}, "spelt"),
    ],
)
async def test_what_the_model_cannot_do_is_refused(fields, said):
    seen = []
    llm = AsyncLLM(StubEngine(lambda request: seen.append(request) or [1]))
    await llm.start()
    try:
        with pytest.raises(InvalidRequest, match=said):
            llm.open(PROMPT, SamplingParams(**fields))
        await read(llm.open(PROMPT, SamplingParams(max_tokens=1, allowed_token_ids=[7, 7, 3])))
    finally:
        await llm.shutdown()
    assert seen[-1].params.allowed_token_ids == (7, 3)
