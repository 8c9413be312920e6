"""Checks by the official openai client of answers that are held to something: tools that must be called, and schemas,
as chat and as responses, whole and streamed, read by the client's own parsers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import openai
from pydantic import BaseModel, Field

from benchmarks.client_checks import QUESTION, TOOL, WEATHER, called, held

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}
# As the responses route takes it.
FLAT: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}


class Capital(BaseModel):
    """A city and its country."""

    city: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]


class GetWeather(BaseModel):
    """The weather in a city."""

    city: Annotated[str, Field(max_length=20)]


def tool(client: openai.OpenAI, model: str) -> str:
    """Forced by its name, streamed and whole; and its result is answered."""
    asked: Any = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 64, "tools": [TOOL]}
    reply = client.chat.completions.create(**asked, tool_choice=FORCED).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls or []
    told = called(call.function.name, call.function.arguments)
    streamed = ""
    for chunk in client.chat.completions.create(**asked, tool_choice=FORCED, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            streamed += piece.function.arguments or ""
    assert streamed == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    asked["messages"] = [*ASK, reply.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**asked, tool_choice="none").choices[0].message
    assert not after.tool_calls
    return f"{told}, then {after.content!r:.60}"


def tool_required(client: openai.OpenAI, model: str) -> str:
    """Some tool, and one call alone."""
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    asked: Any = {"model": model, "messages": ASK, "max_tokens": 64, "tools": [other, TOOL]}
    reply = client.chat.completions.create(**asked, seed=1, tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.function.name in ("get_time", "get_weather")
    return str(call.function.name)


def tool_parsed(client: openai.OpenAI, model: str) -> str:
    """A strict tool of a pydantic class, whose arguments the client makes an object of that class."""
    tools: Any = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    reply = client.chat.completions.parse(
        model=model, messages=ASK, temperature=0, max_tokens=64, tools=tools, tool_choice=FORCED
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    return called(call.function.name, call.function.arguments)


def parsed(client: openai.OpenAI, model: str) -> str:
    asked: Any = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 64, "response_format": Capital}
    reply = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(reply.parsed, Capital)
    with client.chat.completions.stream(**asked) as stream:
        contents = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == reply.parsed
    assert "".join(contents) == reply.content
    return held(reply.content)


def json_object(client: openai.OpenAI, model: str) -> str:
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=48, response_format={"type": "json_object"}
    )
    assert (reply.choices[0].message.content or "").startswith("{")
    return reply.choices[0].message.content or ""


def response_parsed(client: openai.OpenAI, model: str) -> str:
    """The same over responses, whole and streamed."""
    asked: Any = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 64, "text_format": Capital}
    reply = client.responses.parse(**asked)
    assert isinstance(reply.output_parsed, Capital)
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_parsed == reply.output_parsed
    assert text == reply.output_text
    return held(reply.output_text)


def response_tool(client: openai.OpenAI, model: str) -> str:
    """Forced, streamed and whole; and its result is answered by the response that follows."""
    asked: Any = {"model": model, "temperature": 0, "max_output_tokens": 64, "tools": [FLAT]}
    forced: Any = asked | {"input": ASK, "tool_choice": {"type": "function", "name": "get_weather"}}
    reply = client.responses.create(**forced)
    (call,) = [item for item in reply.output if item.type == "function_call"]
    told = called(call.name, call.arguments)
    with client.responses.stream(**forced) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    assert [event.arguments for event in done] == [call.arguments]
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments]
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}]
    answered = asked | {"input": result, "tool_choice": "none", "previous_response_id": reply.id}
    after = client.responses.create(**answered)
    assert after.output_text
    return f"{told}, then {after.output_text!r:.60}"


CHECKS: tuple[Callable[[openai.OpenAI, str], str], ...] = (
    tool,
    tool_required,
    tool_parsed,
    parsed,
    json_object,
    response_parsed,
    response_tool,
)
