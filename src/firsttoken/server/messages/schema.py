"""What ``POST /v1/messages`` and its count of tokens take. None and an explicit null both mean "left out", as in
`server.schema`; what is typed ``Any`` there is known, and not implemented."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from firsttoken.server.schema import ABSENT, Extras, Number


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ephemeral"):
    """Keep the KV of the prompt up to here: five minutes, where ``ttl`` is left out."""

    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of what was said."""


class _CachedBlock(_Block, frozen=True):
    cache_control: CacheControl | None = None


class TextBlock(_CachedBlock, frozen=True, kw_only=True, tag="text"):
    """Text."""

    text: str
    citations: Any = None


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """What the assistant thought. Its ``signature`` is not looked at: nothing is signed here."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_CachedBlock, frozen=True, kw_only=True, tag="tool_use"):
    """The assistant called a tool."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(_CachedBlock, frozen=True, kw_only=True, tag="tool_result"):
    """What the tool gave back; with ``is_error`` the model is told that it failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    toolset_name: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call; ``input_schema`` is the JSON schema of its arguments, which are always streamed
    as they come."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    input_examples: Any = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, frozen=True, kw_only=True, tag="auto"):
    """As the model decides."""


class AnyChoice(_Choice, frozen=True, kw_only=True, tag="any"):
    """Some tool is called."""


class ToolChoice(_Choice, frozen=True, kw_only=True, tag="tool"):
    """This one is called."""

    name: str


class NoChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="none"):
    """None is called."""


class AdaptiveThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="adaptive"):
    """The model thinks as it does."""

    display: Literal["summarized"] | None = None


class NoThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="disabled"):
    """The model does not think."""


class JsonOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON by a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer must be like, and how much is thought before it."""

    effort: str | None = None
    format: JsonOutput | None = None


class MessagesMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes nothing."""

    user_id: str | None = None


class MessagesRequest(Extras, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``. ``messages`` stay raw until their size has been checked."""

    model: str | None = None
    messages: msgspec.Raw = ABSENT
    max_tokens: Number
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: AdaptiveThinking | NoThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    service_tier: str | None = None
    # harmless: it changes nothing that a caller could see
    metadata: MessagesMetadata | None = None
    # known, not implemented: see refusals.py
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``: the fields of a `MessagesRequest` that the prompt is made of."""

    model: str | None = None
    messages: msgspec.Raw = ABSENT
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: AdaptiveThinking | NoThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known, not implemented: see refusals.py
    context_management: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
