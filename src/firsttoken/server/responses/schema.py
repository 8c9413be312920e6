"""What ``POST /v1/responses`` takes. None and an explicit null both mean "left out", as in `server.schema`; what is
typed ``Any`` there is known, and not implemented.

Labels that clients send back with earlier answers (``id``, ``status``, ``annotations``, ``logprobs``) change nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from firsttoken.server.schema import ABSENT, Extras, Number

Status = Literal["in_progress", "completed", "incomplete"]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of what was said."""


class InputText(_Part, frozen=True, tag="input_text"):
    """Text for the model."""

    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(_Part, frozen=True, tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(_Part, frozen=True, tag="refusal"):
    """An earlier answer that declined."""

    refusal: str


class ReasoningText(_Part, frozen=True, tag="reasoning_text"):
    """What a model thought."""

    text: str


class SummaryText(_Part, frozen=True, tag="summary_text"):
    """What another server made of its reasoning."""

    text: str


class _Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    id: str | None = None
    status: Status | None = None


class MessageItem(_Item, frozen=True, tag="message"):
    """Something said by the user, the assistant, or whoever instructs it. Its ``type`` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    phase: Any = None


class FunctionCallItem(_Item, frozen=True, tag="function_call"):
    """The assistant called a function, with arguments as JSON text."""

    call_id: str
    name: str
    arguments: str
    caller: Any = None
    namespace: Any = None


class FunctionOutputItem(_Item, frozen=True, tag="function_call_output"):
    """What the function gave back."""

    call_id: str
    output: str | list[InputText]
    name: str | None = None
    caller: Any = None
    namespace: Any = None


class ReasoningItem(_Item, frozen=True, tag="reasoning"):
    """What the assistant thought before what follows."""

    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Any = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    """The function that must be called."""

    name: str


class _Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PlainText(_Format, frozen=True, tag="text"):
    """Any text."""


class AnyJson(_Format, frozen=True, tag="json_object"):
    """Any JSON object."""


class SchemaJson(_Format, frozen=True, tag="json_schema"):
    """JSON by a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of the answer must be like."""

    format: PlainText | AnyJson | SchemaJson | None = None
    verbosity: Any = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a model that can think thinks."""

    effort: str | None = None
    context: Any = None
    generate_summary: Any = None
    mode: Any = None
    summary: Any = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``include_obfuscation`` must stay false."""

    include_obfuscation: Any = None


class ResponsesRequest(Extras, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``. ``input`` is text or a list of items, raw until its size has been checked."""

    model: str | None = None
    input: msgspec.Raw = ABSENT
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Number | None = None
    top_logprobs: Number | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Any = None
    service_tier: str | None = None
    # harmless: they change nothing that a caller could see, but in what he is told again
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # known, not implemented: see refusals.py
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
