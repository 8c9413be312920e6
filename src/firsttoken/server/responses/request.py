"""From a request for a response to a chat request, which is what all but its shape is looked at in."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from firsttoken.server.errors import bad_request
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.renamed import Name
from firsttoken.server.responses.schema import (
    AnyJson,
    NamedFunction,
    Reasoning,
    ResponsesRequest,
    ResponseStreamOptions,
    ResponseTool,
    SchemaJson,
)
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

LOGPROBS = "message.output_text.logprobs"
# What there is to include only with tools or input that are refused: nothing is left out by not having it.
_NOTHING = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
ToolWord = Literal["none", "auto", "required"]
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512

NAMES = (
    Name(r"messages", "input"),
    Name(r"max_tokens", "max_output_tokens"),
    Name(r"response_format(\.json_schema)?", "text.format"),
    Name(r"verbosity", "text.verbosity"),
    Name(r"reasoning_effort", "reasoning.effort"),
    Name(r"tools\[(\d+)\]\.function", r"tools[\1]"),
    Name(r"tool_choice\.function", "tool_choice"),
)
_REFUSED_TOOL = refused_fields(ResponseTool)
_REFUSED_REASONING = refused_fields(Reasoning)
_REFUSED_OPTIONS = refused_fields(ResponseStreamOptions)


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """All of it but the conversation. Raises `ApiError` 400 for what chat has no field for."""
    _check(request)
    logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not logprobs:
        raise bad_request(f"top_logprobs needs include to have {LOGPROBS!r}", "top_logprobs")
    return ChatRequest(
        model=request.model,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=one_or_more("max_output_tokens", request.max_output_tokens),
        logprobs=logprobs or None,
        top_logprobs=request.top_logprobs if logprobs else None,
        tools=_tools(request.tools),
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request),
        verbosity=None if request.text is None else request.text.verbosity,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        service_tier=request.service_tier,
        **extras_of(request),
    )


def _check(request: ResponsesRequest) -> None:
    if request.reasoning is not None:
        refuse_unimplemented(request.reasoning, _REFUSED_REASONING, "reasoning.")
    if request.stream_options is not None:
        if not request.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        refuse_unimplemented(request.stream_options, _REFUSED_OPTIONS, "stream_options.")
    for index, tool in enumerate(request.tools or ()):
        refuse_unimplemented(tool, _REFUSED_TOOL, f"tools[{index}].")
    for index, one in enumerate(request.include or ()):
        if one != LOGPROBS and one not in _NOTHING:
            raise bad_request(
                f"include[{index}] {one!r:.80} is not supported: {LOGPROBS!r} is, and reasoning is shown as it is",
                f"include[{index}]",
                "unsupported_parameter",
            )
    _check_metadata(request.metadata)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if not metadata:
        return
    if len(metadata) > MAX_METADATA:
        raise bad_request(f"metadata has {len(metadata)} entries; at most {MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise bad_request(
                f"metadata: the key {key!r:.80} has {len(key)} characters and its value {len(value)}; at most "
                f"{MAX_KEY_CHARS} and {MAX_VALUE_CHARS}",
                "metadata",
            )


def _tools(tools: list[ResponseTool] | None) -> list[FunctionTool] | None:
    return None if tools is None else [FunctionTool(function=_function(tool)) for tool in tools]


def _function(tool: ResponseTool) -> ToolFunction:
    return ToolFunction(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def shown_tool(tool: ResponseTool) -> dict[str, Any]:
    """As it is told again in a response."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict or False,
    }


def _choice(choice: ToolWord | NamedFunction | None) -> ToolWord | NamedTool | None:
    return NamedTool(function=FunctionName(name=choice.name)) if isinstance(choice, NamedFunction) else choice


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if isinstance(wanted, SchemaJson):
        given = JSONSchemaFormat(wanted.name, wanted.schema, wanted.description, wanted.strict)
        return ResponseFormat("json_schema", given)
    return ResponseFormat("json_object") if isinstance(wanted, AnyJson) else None


def shown_format(request: ResponsesRequest) -> dict[str, Any]:
    """As it is told again in a response."""
    wanted = None if request.text is None else request.text.format
    shown: dict[str, Any] = {"type": "text"} if wanted is None else msgspec.to_builtins(wanted)
    return shown
