"""Checks of a server's /v1/messages through the official anthropic client. Needs nothing but that package.

python -m benchmarks.anthropic_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import Annotated, Any

import anthropic
from pydantic import BaseModel, Field

from benchmarks.client_checks import CAPITAL, QUESTION, WEATHER, called, held, run

GREEDY = {"temperature": 0}  # newer clients have no name for it
TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": WEATHER}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
FORCED: Any = {
    "messages": ASK,
    "max_tokens": 64,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "get_weather"},
}


class Capital(BaseModel):
    """A city and its country."""

    city: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]


def _ask(client: anthropic.Anthropic, model: str, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": model, "max_tokens": 32, "extra_body": GREEDY, "messages": QUESTION}
    return client.messages.create(**asked | fields)


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def message(client: anthropic.Anthropic, model: str) -> str:
    found = _ask(client, model)
    assert (found.role, found.type) == ("assistant", "message")
    assert found.stop_reason in ("end_turn", "max_tokens")
    assert found.usage.input_tokens > 0
    assert found.usage.output_tokens > 0
    return _text(found)


def message_stream(client: anthropic.Anthropic, model: str) -> str:
    """The client's own gathering of a stream gives the whole answer, and its events come in their order."""
    whole = _ask(client, model)
    with client.messages.stream(model=model, max_tokens=32, extra_body=GREEDY, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == _text(final) == _text(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in _ask(client, model, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    return text


def async_stream(client: anthropic.Anthropic, model: str) -> str:
    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="none", max_retries=0) as other:
            asked: Any = {"model": model, "max_tokens": 32, "extra_body": GREEDY, "messages": QUESTION}
            async with other.messages.stream(**asked) as stream:
                return "".join([piece async for piece in stream.text_stream])

    return asyncio.run(ask())


def system_prompt(client: anthropic.Anthropic, model: str) -> str:
    found = _ask(client, model, system="You are a helpful assistant.", stop_sequences=["."])
    assert found.stop_reason in ("stop_sequence", "max_tokens", "end_turn")
    return f"{found.stop_reason} {found.stop_sequence!r}: {_text(found)}"


def begun(client: anthropic.Anthropic, model: str) -> str:
    """What the assistant has begun is gone on with, and its tokens are those that were counted."""
    turns = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    found = _ask(client, model, messages=turns, max_tokens=4)
    used = found.usage
    counted = client.messages.count_tokens(model=model, messages=turns).input_tokens
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert "Paris" in _text(found)
    return _text(found)


def refusal(client: anthropic.Anthropic, model: str) -> str:
    try:
        _ask(client, model, extra_body={"temperature": -1})
    except anthropic.BadRequestError as error:
        found = str(error)
    else:
        raise AssertionError("temperature -1 was accepted")
    assert "temperature" in found, found
    return found


def tool(client: anthropic.Anthropic, model: str) -> str:
    """A tool that is forced is called, with arguments that fit its schema; and its result is answered."""
    found = _ask(client, model, **FORCED)
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert found.stop_reason == "tool_use"
    told = called(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    turns = [*ASK, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    after = _ask(client, model, **FORCED | {"messages": turns, "tool_choice": {"type": "none"}})
    assert after.stop_reason != "tool_use"
    return f"{told}, then {_text(after)!r:.60}"


def tool_stream(client: anthropic.Anthropic, model: str) -> str:
    """The pieces of the input add up to that of the whole answer."""
    (whole,) = [block for block in _ask(client, model, **FORCED).content if block.type == "tool_use"]
    with client.messages.stream(model=model, extra_body=GREEDY, **FORCED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert json.loads("".join(pieces)) == call.input == whole.input
    assert final.stop_reason == "tool_use"
    return called(call.name, call.input)


def tool_any(client: anthropic.Anthropic, model: str) -> str:
    """Some tool, once."""
    other = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    found = _ask(client, model, **FORCED | {"tools": [other, TOOL], "tool_choice": choice})
    (call,) = [block for block in found.content if block.type == "tool_use"]
    return str(call.name)


def structured(client: anthropic.Anthropic, model: str) -> str:
    """By a schema, and by a pydantic class which the client makes a schema of, and an object of the answer."""
    form = {"format": {"type": "json_schema", "schema": CAPITAL}}
    found = _ask(client, model, max_tokens=64, output_config=form)
    told = held(_text(found))
    asked: Any = {"model": model, "max_tokens": 64, "extra_body": GREEDY, "messages": QUESTION}
    parsed = client.messages.parse(**asked, output_format=Capital).parsed_output
    assert isinstance(parsed, Capital)
    with client.messages.stream(**asked, output_format=Capital) as stream:
        final = stream.get_final_message()
    assert final.parsed_output == parsed
    return told


def main() -> None:
    url = sys.argv[1]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:  # noqa: S310  # our own address
        model = json.load(answer)["data"][0]["id"]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        checks = (message, message_stream, async_stream, system_prompt, begun, refusal)
        held_to = (tool, tool_stream, tool_any, structured)
        run(f"anthropic {anthropic.__version__}", (*checks, *held_to), client, model)


if __name__ == "__main__":
    main()
