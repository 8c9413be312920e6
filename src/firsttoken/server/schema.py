"""The requests, field by field. None and an explicit null both mean "left out".

A field of type ``Any`` is known but not implemented: `refusals` says which values of it are harmless. Numbers that
must be whole are typed ``int | float``, because clients send 1.0; `sampling.whole` checks them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from firsttoken.core.cache_hint import CacheHint
from firsttoken.core.structured_outputs import StructuredOutputsParams

Number = int | float
ABSENT = msgspec.Raw()


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``continuous_usage_stats`` puts the usage so far on every chunk; ``include_obfuscation`` must stay false."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class Extras(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat takes beyond OpenAI's fields, for routes of other APIs: each as in a `ChatRequest`."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Number | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Number | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Number] | None = None
    ignore_eos: bool | None = None
    min_tokens: Number | None = None
    priority: Number | None = None
    cache_salt: str | None = None
    timings: bool | None = None
    deadline_ms: Number | None = None
    cache_hint: CacheHint | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def extras_of(request: Extras) -> dict[str, Any]:
    """They by name, to make a `ChatRequest` of."""
    return {name: getattr(request, name) for name in Extras.__struct_fields__}


class TermsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all that is asked of the engine shares: the model, and on which terms."""

    model: str | None = None
    priority: Number | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    timings: bool | None = None
    deadline_ms: Number | None = None
    cache_hint: CacheHint | None = None
    user: str | None = None


class JSONSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema is enforced whether ``strict`` or not; ``name`` and ``description`` are the caller's own."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``type`` is text, json_object, or json_schema with ``json_schema``."""

    type: str
    json_schema: JSONSchemaFormat | None = None


class GenerationRequest(TermsRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Number | None = None
    max_tokens: Number | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Number | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    # after vLLM
    top_k: Number | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Number] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Number | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    allowed_token_ids: list[Number] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Number | None = None
    truncate_prompt_tokens: Number | None = None
    best_of: Number | None = None
    request_id: str | None = None
    # what the text must look like: see structured.py
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # harmless: they change nothing that a caller could see
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # known, not implemented: see refusals.py
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    spaces_between_special_tokens: Any = None
    store: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that may be called: ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool. There is one type."""

    function: ToolFunction
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that is meant."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Call this one."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``. ``messages`` stays raw until its size has been checked."""

    messages: msgspec.Raw = ABSENT
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    # known, not implemented: see refusals.py
    add_special_tokens: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``. ``prompt``: a string, token ids, or a list of either; raw until its size is checked."""

    prompt: msgspec.Raw = ABSENT
    echo: bool | None = None
    logprobs: Number | None = None
    add_special_tokens: bool | None = None
    # known, not implemented: see refusals.py
    prompt_embeds: Any = None
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    return_token_strs: bool | None = None
    # known, not implemented: see refusals.py
    chat_template: Any = None
    mm_processor_kwargs: Any = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: msgspec.Raw = ABSENT
