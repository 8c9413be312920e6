"""Checks of a server through litellm, as an OpenAI-compatible and as a hosted vLLM one. Needs nothing but that package.

LITELLM_LOCAL_MODEL_COST_MAP=True python -m benchmarks.litellm_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from importlib.metadata import version
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks another host for prices while it is imported

import litellm

from benchmarks.client_checks import missing, run

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _ask(url: str, model: str, provider: str = "openai", **fields: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "messages": QUESTION, "num_retries": 0}
    return litellm.completion(model=f"{provider}/{model}", api_base=f"{url}/v1", api_key="none", **asked | fields)


def chat(url: str, model: str) -> str:
    texts = []
    for provider in ("openai", "hosted_vllm"):
        reply = _ask(url, model, provider)
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        texts.append(reply.choices[0].message.content)
    assert texts[0] == texts[1]
    return str(texts[0])


def chat_stream(url: str, model: str) -> str:
    chunks = list(_ask(url, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == _ask(url, model).choices[0].message.content
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole.usage.completion_tokens == _ask(url, model).usage.completion_tokens
    return text


def refusal(url: str, model: str) -> str:
    try:
        _ask(url, model, n=0)
    except litellm.BadRequestError as error:
        return f"{type(error).__name__}: {error}"[:200]
    raise AssertionError("n=0 was accepted")


def tool(url: str, model: str) -> str:
    """A tool that is forced is called, streamed and whole."""
    forced: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }
    try:
        whole = _ask(url, model, max_tokens=128, **forced)
    except litellm.BadRequestError as error:
        raise missing(error) from None
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    chunks = list(_ask(url, model, max_tokens=128, stream=True, **forced))
    streamed = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    return str(call.function.arguments)


def embeddings(url: str, model: str) -> str:
    try:
        reply = litellm.embedding(
            model=f"openai/{model}", input=["France", "soup"], api_base=f"{url}/v1", api_key="none", num_retries=0
        )
    except (litellm.NotFoundError, litellm.BadRequestError) as error:
        raise missing(error) from None
    first, second = (one["embedding"] for one in reply.data)
    assert len(first) == len(second) > 1
    return f"{len(first)} dimensions"


def main() -> None:
    url = sys.argv[1]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:  # noqa: S310  # our own address
        model = json.load(answer)["data"][0]["id"]
    run(f"litellm {version('litellm')}", (chat, chat_stream, refusal, tool, embeddings), url, model)


if __name__ == "__main__":
    main()
