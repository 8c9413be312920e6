"""What ``/v1/responses`` answers, as types that describe, and what its ``input`` takes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from firsttoken.server.openapi.answers import Answer, ChosenLogprob, ServiceTier, Timings
from firsttoken.server.responses.schema import Status

_REF = "#/components/schemas/"
_STATUSES = {"enum": ["in_progress", "completed", "incomplete", None]}
_PARTS = [{"$ref": _REF + name} for name in ("InputText", "OutputText", "Refusal")]
_TEXT = {"type": "string"}
_UNTYPED = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": {"oneOf": _PARTS}}]},
        "type": {"type": "null"},
        "id": {"type": ["string", "null"]},
        "status": _STATUSES,
    },
    "additionalProperties": False,
}
_ITEMS = [{"$ref": _REF + name} for name in ("MessageItem", "FunctionCallItem", "FunctionOutputItem", "ReasoningItem")]
INPUT = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": [*_ITEMS, _UNTYPED]}}]}
"""The schema of ``input``: of all items only a message may do without its type."""


class CacheUse(Answer):
    """Prompt tokens that were found in the KV cache; to write them to it costs nothing."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningUse(Answer):
    """Tokens of the answer that were reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of the prompt and the answer."""

    input_tokens: int
    input_tokens_details: CacheUse
    output_tokens: int
    output_tokens_details: ReasoningUse
    total_tokens: int


class TextPart(Answer, tag="output_text", tag_field="type"):
    """Text of an answer; ``logprobs`` where ``include`` asks for them."""

    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class ReasoningPart(Answer, tag="reasoning_text", tag_field="type"):
    """What the model thought."""

    text: str


class OutputMessage(Answer, tag="message", tag_field="type"):
    """Something said. It has no content while it is being said."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[TextPart]


class OutputReasoning(Answer, tag="reasoning", tag_field="type"):
    """Something thought."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningPart]


class OutputCall(Answer, tag="function_call", tag_field="type"):
    """A function that is to be called, with arguments as JSON text."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseFailure(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Answer):
    """A response: what was asked for, as it was understood, and what was answered."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: ServiceTier
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    timings: Timings | UnsetType = UNSET


class DeletedResponse(Answer):
    """A response that is not kept any more."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Answer):
    """The items of a response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---------------------------------------------------------------------------- events


class _Event(Answer, tag_field="type"):
    sequence_number: int


class _ResponseEvent(_Event):
    response: ResponseObject


class Created(_ResponseEvent, tag="response.created"):
    """The first."""


class InProgress(_ResponseEvent, tag="response.in_progress"):
    """The second."""


class Completed(_ResponseEvent, tag="response.completed"):
    """The last."""


class Incomplete(_ResponseEvent, tag="response.incomplete"):
    """The last of an answer that is as long as it may be."""


class Failed(_ResponseEvent, tag="response.failed"):
    """The last of an answer that could not be completed."""


class ItemAdded(_Event, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(_Event, tag="response.output_item.done"):
    """The item is complete."""

    output_index: int
    item: OutputItem


class _PlaceEvent(_Event):
    item_id: str
    output_index: int


class _PartEvent(_PlaceEvent):
    content_index: int


class PartAdded(_PartEvent, tag="response.content_part.added"):
    """A part of an item begins."""

    part: TextPart | ReasoningPart


class PartDone(_PartEvent, tag="response.content_part.done"):
    """The part is complete."""

    part: TextPart | ReasoningPart


class TextDelta(_PartEvent, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[ChosenLogprob]


class TextDone(_PartEvent, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: list[ChosenLogprob]


class ReasoningDelta(_PartEvent, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_PartEvent, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class ArgumentsDelta(_PlaceEvent, tag="response.function_call_arguments.delta"):
    """More of the arguments' JSON text."""

    delta: str


class ArgumentsDone(_PlaceEvent, tag="response.function_call_arguments.done"):
    """The whole arguments."""

    name: str
    arguments: str


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
