"""From a request for a message to a chat request, which is what all but its shape is looked at in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from firsttoken.core.cache_hint import CacheHint
from firsttoken.server.errors import bad_request
from firsttoken.server.messages.blocks import cache_controls, check_texts
from firsttoken.server.messages.schema import (
    AnyChoice,
    AutoChoice,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    NoChoice,
    NoThinking,
    ToolChoice,
)
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.renamed import Name
from firsttoken.server.sampling import one_or_more
from firsttoken.server.schema import (
    ChatRequest,
    FunctionName,
    FunctionTool,
    JSONSchemaFormat,
    NamedTool,
    ResponseFormat,
    ToolFunction,
    extras_of,
)

_TTL_S = {None: 300, "5m": 300, "1h": 3600}
# Capacity that nobody has promised anything for, whatever the key's usual class is.
_STANDARD_ONLY = "flex"
_REFUSED_TOOL = refused_fields(MessagesTool)

_NAMES = (
    Name(r"stop", "stop_sequences"),
    Name(r"response_format(\.json_schema)?(\.name)?", "output_config.format"),
    Name(r"reasoning_effort", "output_config.effort"),
    Name(r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    Name(r"tools\[(\d+)\]\.function", r"tools[\1]"),
    Name(r"tool_choice\.function", "tool_choice"),
    Name(r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    Name(r"continue_final_message", "messages"),
)


def names(request: MessagesRequest | CountTokensRequest) -> Sequence[Name]:
    """What chat's fields are called here: how much to think is said in one of two places."""
    return (Name("reasoning_effort", "thinking"), *_NAMES) if isinstance(request.thinking, NoThinking) else _NAMES


def chat_request(request: MessagesRequest, turns: Sequence[InputMessage]) -> ChatRequest:
    """All of it but the conversation. Raises `ApiError` 400 for what chat has no field for."""
    if request.temperature is not None and request.temperature > 1:
        raise bad_request(f"temperature must be in [0, 1], got {request.temperature!r}", "temperature")
    fields = {**extras_of(request), **_prompt_fields(request, turns)}
    hint = _hint(request, turns)
    if hint is not None:
        if request.cache_hint is not None:
            raise bad_request(
                "cache_hint and cache_control both say how long to keep the prompt: send one", "cache_hint"
            )
        fields["cache_hint"] = hint
    return ChatRequest(
        stream=request.stream,
        max_tokens=one_or_more("max_tokens", request.max_tokens),
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop_sequences,
        service_tier=_STANDARD_ONLY if request.service_tier == "standard_only" else request.service_tier,
        **fields,
    )


def prompt_request(request: CountTokensRequest, turns: Sequence[InputMessage]) -> ChatRequest:
    """What its prompt is made by. Raises `ApiError` 400 for what chat has no field for."""
    return ChatRequest(chat_template_kwargs=request.chat_template_kwargs, **_prompt_fields(request, turns))


def _prompt_fields(request: MessagesRequest | CountTokensRequest, turns: Sequence[InputMessage]) -> dict[str, Any]:
    """All that the prompt depends on."""
    for index, tool in enumerate(request.tools or ()):
        refuse_unimplemented(tool, _REFUSED_TOOL, f"tools[{index}].")
    if not isinstance(request.system, str):
        check_texts(request.system or (), "system")
    choice = request.tool_choice
    parallel = None if choice is None or isinstance(choice, NoChoice) else choice.disable_parallel_tool_use
    return {
        "model": request.model,
        "tools": None if request.tools is None else [_tool(tool) for tool in request.tools],
        "tool_choice": _choice(choice),
        "parallel_tool_calls": None if parallel is None else not parallel,
        "reasoning_effort": _effort(request),
        "response_format": _format(request),
        # What the assistant has begun to say is gone on with.
        "continue_final_message": True if turns[-1].role == "assistant" else None,
    }


def _tool(tool: MessagesTool) -> FunctionTool:
    function = ToolFunction(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return FunctionTool(function=function)


def _choice(
    choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    match choice:
        case None:
            return None
        case AutoChoice():
            return "auto"
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
        case ToolChoice():
            return NamedTool(function=FunctionName(name=choice.name))


def _effort(request: MessagesRequest | CountTokensRequest) -> str | None:
    effort = None if request.output_config is None else request.output_config.effort
    if not isinstance(request.thinking, NoThinking):
        return effort
    if effort is not None:
        raise bad_request(
            "output_config.effort says how much to think, and thinking is disabled: send one", "output_config.effort"
        )
    return "none"


def _format(request: MessagesRequest | CountTokensRequest) -> ResponseFormat | None:
    wanted = None if request.output_config is None else request.output_config.format
    if wanted is None:
        return None
    return ResponseFormat("json_schema", JSONSchemaFormat("output", wanted.schema, strict=True))


def _hint(request: MessagesRequest, turns: Sequence[InputMessage]) -> CacheHint | None:
    """The longest that any part of the prompt shall be kept: it is kept as a whole."""
    controls = [*cache_controls(turns, request.system)]
    controls += [tool.cache_control for tool in request.tools or () if tool.cache_control is not None]
    if request.cache_control is not None:
        controls.append(request.cache_control)
    return CacheHint(ttl_s=max(_TTL_S[one.ttl] for one in controls)) if controls else None
