"""From a request's fields to `SamplingParams`.

A value comes from the request, else from the checkpoint's generation config (temperature, top_p, top_k, min_p,
repetition_penalty), else from OpenAI's defaults: temperature 1, top_p 1, n 1, no penalties, and ``max_tokens`` 16 for
completions, up to the model's length for chat.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.server.errors import bad_request
from firsttoken.server.schema import ChatRequest, CompletionRequest, GenerationRequest, Number
from firsttoken.server.structured import grammar_of

COMPLETION_MAX_TOKENS = 16

V = TypeVar("V")


def whole(name: str, value: Number | None) -> int | None:
    """The value as an int; 3.0 is fine, 3.5 is a 400."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value) or value != int(value):
        raise bad_request(f"{name} must be a whole number, got {value!r}", name)
    return int(value)


def one_or_more(name: str, value: Number | None) -> int | None:
    """The same of what cannot be 0 either."""
    found = whole(name, value)
    if found is not None and found < 1:
        raise bad_request(f"{name} must be 1 or more, got {found}", name)
    return found


def chat_params(request: ChatRequest, defaults: GenerationConfig) -> SamplingParams:
    """Raises `ApiError` or `InvalidRequest`, naming the field."""
    max_tokens = whole("max_tokens", request.max_tokens)
    completion = whole("max_completion_tokens", request.max_completion_tokens)
    if max_tokens is not None and completion is not None and max_tokens != completion:
        raise bad_request(
            f"max_tokens ({max_tokens}) and max_completion_tokens ({completion}) differ; send one", "max_tokens"
        )
    top = whole("top_logprobs", request.top_logprobs)
    if top and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (top or 0) if request.logprobs else None
    if max_tokens is not None:
        return _params(request, defaults, max_tokens, logprobs, "top_logprobs")
    try:
        return _params(request, defaults, completion, logprobs, "top_logprobs")
    except InvalidRequest as error:
        if error.param != "max_tokens":
            raise
        name = "max_completion_tokens"  # as the caller calls it
        raise InvalidRequest(error.message.replace("max_tokens", name, 1), param=name, code=error.code) from None


def completion_params(request: CompletionRequest, defaults: GenerationConfig) -> SamplingParams:
    """Raises `ApiError` or `InvalidRequest`, naming the field."""
    logprobs = whole("logprobs", request.logprobs)
    max_tokens = _or(whole("max_tokens", request.max_tokens), COMPLETION_MAX_TOKENS)
    params = _params(request, defaults, max_tokens, logprobs, "logprobs", scores=bool(request.echo))
    if request.echo and logprobs is not None:  # those of the prompt too
        params = params.replace(prompt_logprobs=max(logprobs, params.prompt_logprobs or 0))
    return params


def _params(
    request: GenerationRequest,
    defaults: GenerationConfig,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_name: str,
    *,
    scores: bool = False,
) -> SamplingParams:
    """``scores``: the prompt is told of, and nothing need be generated."""
    if logprobs is not None and not 0 <= logprobs <= 20:
        raise bad_request(f"{logprobs_name} must be in [0, 20], got {logprobs}", logprobs_name)
    told = whole("prompt_logprobs", request.prompt_logprobs)
    if told is not None and request.stream:
        raise bad_request("prompt_logprobs are not told in a stream: leave out stream, or this", "prompt_logprobs")
    if max_tokens == 0 and told is None and not scores:
        raise InvalidRequest(
            "max_tokens must be 1 or more, got 0, which is for prompt_logprobs or echo alone", param="max_tokens"
        )
    fields = _FIELDS(request)
    # Callers ask in the same way again and again. Lists may be long, and are looked at anew.
    build = _build if all(value is None for value in fields[:_LISTS]) else _build.__wrapped__
    params = build(fields, defaults, max_tokens, logprobs)
    best = whole("best_of", request.best_of)
    if best is not None and best != params.n:
        raise bad_request(
            f"best_of must be n ({params.n}): no more answers are made than are told, got {best}", "best_of"
        )
    keep = whole("truncate_prompt_tokens", request.truncate_prompt_tokens)
    allowed, bad = request.allowed_token_ids, request.bad_words
    grammar = grammar_of(request)
    if told is None and keep is None and allowed is None and not bad and grammar is None:
        return params
    return params.replace(
        prompt_logprobs=told,
        truncate_prompt_tokens=keep,
        allowed_token_ids=_ids("allowed_token_ids", allowed),
        bad_words=bad or None,
        grammar=grammar,
    )


_LISTS = 3
_FIELDS = attrgetter(
    "stop",
    "stop_token_ids",
    "logit_bias",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


@lru_cache(maxsize=256)
def _build(
    fields: tuple[Any, ...], defaults: GenerationConfig, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters of a request with these ``fields`` (see `_FIELDS`)."""
    stop, stop_ids, bias, n, temperature, top_p, top_k, min_p, presence, frequency, repetition, *rest = fields
    seed, include_stop, ignore_eos, min_tokens, skip_special_tokens = rest
    return SamplingParams(
        n=_or(whole("n", n), 1),
        temperature=_first(temperature, defaults.temperature, 1.0),
        top_p=_first(top_p, defaults.top_p, 1.0),
        top_k=_first(whole("top_k", top_k), defaults.top_k, 0),
        min_p=_first(min_p, defaults.min_p, 0.0),
        presence_penalty=_or(presence, 0.0),
        frequency_penalty=_or(frequency, 0.0),
        repetition_penalty=_first(repetition, defaults.repetition_penalty, 1.0),
        seed=whole("seed", seed),
        stop=stop,
        stop_token_ids=_ids("stop_token_ids", stop_ids),
        include_stop_str_in_output=bool(include_stop),
        ignore_eos=bool(ignore_eos),
        max_tokens=max_tokens,
        min_tokens=_or(whole("min_tokens", min_tokens), 0),
        logprobs=logprobs,
        logit_bias=_logit_bias(bias),
        skip_special_tokens=_or(skip_special_tokens, True),
    )


def _ids(name: str, ids: list[Number] | None) -> list[int] | None:
    return None if ids is None else [whole(name, token) or 0 for token in ids]


# int() admits signs, blanks and other scripts' digits; and of "7" and "07", which are two keys, one would be lost.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise bad_request(f"logit_bias: {token!r} is not a token id", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def _first(value: V | None, second: V | None, default: V) -> V:
    return _or(_or(value, second), default)
