"""Checks of a server's /v1/messages through the official anthropic client. Needs nothing but that package.

python -m benchmarks.anthropic_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import anthropic

from benchmarks.client_checks import missing, run

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}  # newer clients have no name for it
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def _ask(client: anthropic.Anthropic, model: str, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": model, "max_tokens": 32, "extra_body": GREEDY, "messages": QUESTION}
    try:
        return client.messages.create(**asked | fields)
    except anthropic.NotFoundError as error:
        raise missing(error) from None


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
    """The client's own gathering of a stream gives the whole answer."""
    whole = _ask(client, model)
    with client.messages.stream(model=model, max_tokens=32, extra_body=GREEDY, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == _text(final) == _text(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    return text


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
    """A tool that is forced is called, with arguments that fit its schema."""
    try:
        found = _ask(
            client, model, max_tokens=128, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}
        )
    except anthropic.BadRequestError as error:
        raise missing(error) from None
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert found.stop_reason == "tool_use"
    assert call.name == "get_weather"
    assert isinstance(call.input["city"], str)
    return json.dumps(call.input)


def main() -> None:
    url = sys.argv[1]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:  # noqa: S310  # our own address
        model = json.load(answer)["data"][0]["id"]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        checks = (message, message_stream, system_prompt, begun, refusal, tool)
        run(f"anthropic {anthropic.__version__}", checks, client, model)


if __name__ == "__main__":
    main()
