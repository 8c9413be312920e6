"""What the routes answer, as types: they describe, and nothing is encoded with them.

A struct that forbids unknown fields is complete: an answer with another key is a fault of this file. What may be left
out has ``UNSET``; what is always there, but may be null, has no default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Timings = dict[str, Any]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
ServiceTier = Literal["default", "flex", "priority", "p0", "p1", "p2"]


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all: a key that is not named here must not be in an answer."""


class ErrorDetail(Answer):
    """``param`` names the field at fault, ``code`` is a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Answer):
    """Every answer other than success; in a stream that fails, the last event."""

    error: ErrorDetail


class CachedTokens(Answer):
    """Prompt tokens that were found in the KV cache, in all tiers together."""

    cached_tokens: int


class ReasoningTokens(Answer):
    """Tokens of answers that are reasoning, with the marks around it."""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens of all prompts and answers of the request; ``completion_tokens_details`` where the model reasons."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class PromptLogprob(Answer):
    """Of one token in a prompt's place; ``rank`` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# By token id; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


# ------------------------------------------------------------------ chat completions


class TokenLogprob(Answer):
    """A token with the logarithm of its probability; an impossible token has -9999."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with the likeliest tokens of its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry a token."""

    content: list[ChosenLogprob]
    refusal: None


class CalledFunction(Answer):
    """``arguments`` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A tool that the model calls."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answer):
    """The answer of one choice; ``content`` is null where there are only calls. ``reasoning`` is what vLLM's newer
    clients call ``reasoning_content``."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    """``stop_reason``: the stop string or token id that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer):
    """A whole answer in chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: ServiceTier
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class FunctionDelta(Answer):
    """The name comes with a call's first piece, its arguments with those after it."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answer):
    """A piece of the answer's call number ``index``."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    """What a chunk adds to a choice; the last one of a choice adds nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """A piece of one choice; ``finish_reason`` on its last piece."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer):
    """One event of a stream. With ``include_usage`` each has ``usage``, null but in the last, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: ServiceTier
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


# ----------------------------------------------------------------------- completions


class LegacyLogprobs(Answer):
    """Four lists of equal length, one entry a token; null for the first of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """``index`` counts the answers of the first prompt, then those of the second, and so on."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Answer):
    """All answers to the prompts of one request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: ServiceTier
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class CompletionChunkChoice(Answer):
    """A piece of one choice; ``finish_reason`` on its last piece."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Answer):
    """One event of a stream. With ``include_usage`` each has ``usage``, null but in the last, which has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: ServiceTier
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


# ---------------------------------------------------------------------------- vectors


class PromptUsage(Answer):
    """Tokens of all inputs: nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """Numbers, or base64 of them as float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """A vector for each input, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage
    timings: dict[str, Any] | UnsetType = UNSET


class Score(Answer):
    """The cosine of two vectors, in [-1, 1]."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    """Of each pair of texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
    timings: dict[str, Any] | UnsetType = UNSET


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document, by its place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Answer):
    """The likest first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[Ranked]
    timings: dict[str, Any] | UnsetType = UNSET


# ---------------------------------------------------------------------- token routes


class Tokenized(Answer):
    """``token_strs`` is null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The text of the tokens; bytes that are not UTF-8 are U+FFFD."""

    prompt: str


# ----------------------------------------------------------------- about the server


class ModelCard(Answer):
    """``self_check``: what comparing with the model's own reference gave, null where it has none."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    self_check: dict[str, Any] | None


class ModelList(Answer):
    """The one model that is served."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(Answer):
    """The server's version."""

    version: str


class RequestRecord(Answer):
    """A request that has ended. ``timings`` is its account; ``timeline`` and ``token_ms`` only where one is asked for
    by its id."""

    id: str
    object: Literal["request"]
    response_id: str | None
    route: str
    model: str
    service_class: str | None
    received: float
    outcome: str
    status: int | None
    error: str | None
    finish_reason: str | None
    answers: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    timings: Timings | None
    # A name and a time, in words that are the same in all dialects: of prefixItems some readers make what is no schema.
    timeline: list[Annotated[list[str | float], msgspec.Meta(min_length=2, max_length=2)]] | UnsetType = UNSET
    token_ms: list[float] | UnsetType = UNSET


class RequestList(Answer):
    """The latest requests that have ended, newest first."""

    object: Literal["list"]
    data: list[RequestRecord]


class Blocks(Answer):
    """KV blocks of the device, as of now."""

    total: int
    used: int
    cached: int
    free: int


class KVCache(Answer):
    """Blocks as of now, all else totals since the start; null where nothing was told yet, or there is no such tier."""

    blocks: Blocks
    block_tokens: int
    bytes_per_block: int
    hits: dict[str, Any] | None
    heat: dict[str, Any] | None
    misses: dict[str, int] | None
    evictions: dict[str, Any] | None
    hints: dict[str, int] | None
    restores: dict[str, Any] | None
    disk: dict[str, Any] | None
