"""What ``/v1/messages`` answers, as types that describe."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from firsttoken.server.openapi.answers import Answer, Timings


class MessagesErrorDetail(Answer):
    """``type`` is Anthropic's word for the status."""

    type: str
    message: str


class MessagesError(Answer, tag="error", tag_field="type"):
    """Every answer other than success; in a stream that fails, the last event."""

    error: MessagesErrorDetail
    request_id: str | None


class ThinkingUse(Answer):
    """Tokens of the answer that were thought."""

    thinking_tokens: int


class MessageUsage(Answer):
    """``input_tokens`` are those of the prompt that were not found in the cache; to write to it costs nothing."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard", "priority"]
    output_tokens_details: ThinkingUse | UnsetType = UNSET


class MessageText(Answer, tag="text", tag_field="type"):
    """Something said."""

    text: str


class MessageThinking(Answer, tag="thinking", tag_field="type"):
    """Something thought. Nothing is signed."""

    thinking: str
    signature: str


class MessageToolUse(Answer, tag="tool_use", tag_field="type"):
    """A tool that is to be called."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = MessageText | MessageThinking | MessageToolUse
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageObject(Answer, tag="message", tag_field="type"):
    """An answer."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class TokenCount(Answer):
    """Tokens of a prompt."""

    input_tokens: int


# ---------------------------------------------------------------------------- events


class MessageStart(Answer, tag="message_start", tag_field="type"):
    """The first: the answer before anything is said."""

    message: MessageObject


class Ping(Answer, tag="ping", tag_field="type"):
    """The second, which says nothing."""


class BlockStart(Answer, tag="content_block_start", tag_field="type"):
    """A block begins, without its text."""

    index: int
    content_block: ContentBlock


class MoreText(Answer, tag="text_delta", tag_field="type"):
    """More text."""

    text: str


class MoreThinking(Answer, tag="thinking_delta", tag_field="type"):
    """More that was thought."""

    thinking: str


class MoreInput(Answer, tag="input_json_delta", tag_field="type"):
    """More of the JSON text of a tool's arguments."""

    partial_json: str


class BlockDelta(Answer, tag="content_block_delta", tag_field="type"):
    """More of a block."""

    index: int
    delta: MoreText | MoreThinking | MoreInput


class BlockStop(Answer, tag="content_block_stop", tag_field="type"):
    """The block is complete."""

    index: int


class MessageEnd(Answer):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, tag="message_delta", tag_field="type"):
    """The answer has ended."""

    delta: MessageEnd
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class MessageStop(Answer, tag="message_stop", tag_field="type"):
    """The last."""


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
