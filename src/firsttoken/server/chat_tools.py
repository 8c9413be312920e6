"""The tools of a chat completion request."""

from __future__ import annotations

from firsttoken.server.errors import bad_request
from firsttoken.server.schema import ChatRequest, FunctionTool, NamedTool
from firsttoken.server.tools import Tool, ToolUse, check_tools


def offered(given: list[FunctionTool] | None, limit: int) -> list[Tool]:
    """The tools, which may take so many bytes of JSON. Raises `ApiError` 400 that names the place."""
    tools = [
        Tool(
            name=one.function.name,
            description=one.function.description,
            parameters=one.function.parameters,
            strict=bool(one.function.strict),
            place=f"tools[{index}].function",
        )
        for index, one in enumerate(given or ())
    ]
    check_tools(tools, limit)
    return tools


def chat_tools(request: ChatRequest, limit: int) -> ToolUse | None:
    """What may be called, None where nothing may: then the model is not told of the tools either, since what it knows
    of it calls. ``limit`` is how many bytes of JSON they may take. Raises `ApiError` 400 that names the place."""
    tools, choice = offered(request.tools, limit), request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and there are no tools: send tools", "tool_choice")
        return None
    if choice == "none":
        return None
    only = choice.function.name if isinstance(choice, NamedTool) else None
    if only is not None and all(tool.name != only for tool in tools):
        known = ", ".join(tool.name for tool in tools)
        raise bad_request(
            f"tool_choice names {only!r:.100}, which is not one of the tools ({known:.200})",
            "tool_choice.function.name",
        )
    return ToolUse(
        tools,
        forced=only is not None or choice == "required",
        only=only,
        parallel=only is None and request.parallel_tool_calls is not False,  # a named one is called once, as by OpenAI
    )
