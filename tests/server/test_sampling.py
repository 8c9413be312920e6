"""From a request's fields to sampling parameters: what is made once for callers who ask alike."""

from __future__ import annotations

import msgspec
import pytest

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.errors import InvalidRequest
from firsttoken.server.errors import ApiError
from firsttoken.server.sampling import chat_params
from firsttoken.server.schema import ChatRequest

DEFAULTS = GenerationConfig(temperature=0.5)


def params(defaults=DEFAULTS, **fields):
    return chat_params(msgspec.convert(fields, ChatRequest), defaults)


def test_equal_requests_share_their_parameters():
    assert params(temperature=0.1, max_tokens=5) is params(temperature=0.1, max_tokens=5.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.2},
        {"seed": 1},
        {"max_tokens": 6},
        {"logprobs": True},
        {"ignore_eos": True},
        {"stop": "x"},
        {"stop_token_ids": [1]},
        {"logit_bias": {"1": 2.0}},
        {"min_tokens": 1},
        {"skip_special_tokens": False},
    ],
)
def test_whatever_differs_makes_other_parameters(fields):
    assert params(**fields) != params()


def test_the_checkpoints_defaults_count():
    assert params().temperature == 0.5
    assert params(GenerationConfig(temperature=0.75)).temperature == 0.75


@pytest.mark.parametrize("fields", [{"stop": ["a", "b"]}, {"stop_token_ids": [3]}, {"logit_bias": {"7": -1.0}}])
def test_lists_are_read_anew(fields):
    assert params(**fields) == params(**fields)
    assert params(**fields) is not params(**fields)


@pytest.mark.parametrize("fields", [{"temperature": -1.0}, {"n": 1.5}, {"top_p": 0.0}])
def test_what_is_wrong_is_refused_each_time(fields):
    for _ in range(2):
        with pytest.raises((ApiError, InvalidRequest)):
            params(**fields)
