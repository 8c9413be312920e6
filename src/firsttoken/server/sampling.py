"""From a request's fields to `SamplingParams`.

A value comes from the request, else from the checkpoint's generation config (temperature, top_p, top_k, min_p,
repetition_penalty), else from OpenAI's defaults: temperature 1, top_p 1, n 1, no penalties, and ``max_tokens`` 16 for
completions, up to the model's length for chat.
"""

from __future__ import annotations

import math
from typing import TypeVar

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.server.errors import bad_request
from firsttoken.server.schema import ChatRequest, CompletionRequest, GenerationRequest, Number

COMPLETION_MAX_TOKENS = 16
MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31

V = TypeVar("V")


def whole(name: str, value: Number | None) -> int | None:
    """The value as an int; 3.0 is fine, 3.5 is a 400."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value) or value != int(value):
        raise bad_request(f"{name} must be a whole number, got {value!r}", name)
    return int(value)


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
    return _params(request, defaults, completion if max_tokens is None else max_tokens, logprobs, "top_logprobs")


def completion_params(request: CompletionRequest, defaults: GenerationConfig) -> SamplingParams:
    """Raises `ApiError` or `InvalidRequest`, naming the field."""
    logprobs = whole("logprobs", request.logprobs)
    if request.echo and logprobs is not None:
        raise bad_request("logprobs of an echoed prompt are not supported: leave out echo or logprobs", "echo")
    max_tokens = _or(whole("max_tokens", request.max_tokens), COMPLETION_MAX_TOKENS)
    return _params(request, defaults, max_tokens, logprobs, "logprobs")


def priority(request: GenerationRequest) -> int:
    """Lower goes first, as in vLLM."""
    value = whole("priority", request.priority) or 0
    if not -MAX_PRIORITY <= value < MAX_PRIORITY:
        raise bad_request(f"priority must fit 32 bits, got {value!r}", "priority")
    return value


def cache_salt(request: GenerationRequest, tenant: str) -> str:
    """What isolates this request's cached prefixes: the tenant (from the API key) and the caller's own salt."""
    own = request.cache_salt
    if own is None:
        return tenant
    if not 1 <= len(own) <= MAX_SALT_CHARS:
        raise bad_request(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(own)}", "cache_salt")
    return f"{tenant}/{own}"


def _params(
    request: GenerationRequest,
    defaults: GenerationConfig,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_name: str,
) -> SamplingParams:
    if logprobs is not None and not 0 <= logprobs <= 20:
        raise bad_request(f"{logprobs_name} must be in [0, 20], got {logprobs}", logprobs_name)
    return SamplingParams(
        n=_or(whole("n", request.n), 1),
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=_first(whole("top_k", request.top_k), defaults.top_k, 0),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        seed=whole("seed", request.seed),
        stop=request.stop,
        stop_token_ids=_stop_ids(request.stop_token_ids),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        max_tokens=max_tokens,
        min_tokens=_or(whole("min_tokens", request.min_tokens), 0),
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias),
        skip_special_tokens=_or(request.skip_special_tokens, True),
    )


def _stop_ids(ids: list[Number] | None) -> list[int] | None:
    return None if ids is None else [whole("stop_token_ids", token) or 0 for token in ids]


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    # isdecimal() alone admits other scripts' digits, and int() a sign or blanks: only plain ASCII ids are meant.
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise bad_request(f"logit_bias: {token!r} is not a token id", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def _first(value: V | None, second: V | None, default: V) -> V:
    return _or(_or(value, second), default)
