"""Checks of a server through litellm, as an OpenAI-compatible, a hosted vLLM and an Anthropic one. Needs nothing but
that package.

LITELLM_LOCAL_MODEL_COST_MAP=True python -m benchmarks.litellm_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from importlib.metadata import version
from typing import Annotated, Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks another host for prices while it is imported

import litellm
from pydantic import BaseModel, Field

from benchmarks.client_checks import CAPITAL, QUESTION, TOOL, called, held, run

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
FORCED: Any = {
    "messages": ASK,
    "max_tokens": 64,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
}


class Capital(BaseModel):
    """A city and its country."""

    city: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]


def _ask(url: str, model: str, provider: str = "openai", **fields: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "messages": QUESTION, "num_retries": 0}
    base = f"{url}/v1/messages" if provider == "anthropic" else f"{url}/v1"
    return litellm.completion(model=f"{provider}/{model}", api_base=base, api_key="none", **asked | fields)


def chat(url: str, model: str) -> str:
    texts = []
    for provider in ("openai", "hosted_vllm", "anthropic"):
        reply = _ask(url, model, provider)
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        texts.append(reply.choices[0].message.content)
    assert len(set(texts)) == 1, texts
    return str(texts[0])


def chat_stream(url: str, model: str) -> str:
    for provider in ("openai", "anthropic"):
        chunks = list(_ask(url, model, provider, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        whole = _ask(url, model)
        assert text == whole.choices[0].message.content
        gathered = litellm.stream_chunk_builder(chunks, messages=QUESTION)
        assert gathered.usage.completion_tokens == whole.usage.completion_tokens
    return text


def async_stream(url: str, model: str) -> str:
    async def ask() -> str:
        reply = await litellm.acompletion(
            model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", messages=QUESTION, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

    return asyncio.run(ask())


def completion(url: str, model: str) -> str:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        prompt="The capital of France is",
        api_base=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=4,
    )
    return str(reply.choices[0].text)


def refusal(url: str, model: str) -> str:
    try:
        _ask(url, model, n=0)
    except litellm.BadRequestError as error:
        return f"{type(error).__name__}: {error}"[:200]
    raise AssertionError("n=0 was accepted")


def tool(url: str, model: str) -> str:
    """A tool that is forced is called, streamed and whole; and its result is answered."""
    for provider in ("openai", "hosted_vllm", "anthropic"):
        whole = _ask(url, model, provider, **FORCED).choices[0]
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == "tool_calls"
        told = called(call.function.name, call.function.arguments)
        chunks = list(_ask(url, model, provider, stream=True, **FORCED))
        (streamed,) = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
        turns = [*ASK, whole.message.model_dump(exclude_none=True), result]
        after = _ask(url, model, provider, **FORCED | {"messages": turns, "tool_choice": "none"}).choices[0].message
        assert not after.tool_calls
    return f"{told}, then {after.content!r:.60}"


def structured(url: str, model: str) -> str:
    """By a schema, and by a pydantic class."""
    form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL, "strict": True}}
    told = ""
    for provider in ("openai", "hosted_vllm"):
        for given in (form, Capital):
            reply = _ask(url, model, provider, max_tokens=64, response_format=given)
            told = held(reply.choices[0].message.content)
    return told


def responses(url: str, model: str) -> str:
    asked: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "input": QUESTION}
    asked |= {"temperature": 0, "max_output_tokens": 32}
    whole = litellm.responses(**asked)
    (text,) = [part.text for item in whole.output if item.type == "message" for part in item.content]
    events = list(litellm.responses(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    return str(text)


def embeddings(url: str, model: str) -> str:
    reply = litellm.embedding(
        model=f"openai/{model}", input=["France", "soup"], api_base=f"{url}/v1", api_key="none", num_retries=0
    )
    first, second = (one["embedding"] for one in reply.data)
    assert len(first) == len(second) > 1
    return f"{len(first)} dimensions"


def rerank(url: str, model: str) -> str:
    reply = litellm.rerank(
        model=f"hosted_vllm/{model}",
        query="France",
        documents=["Paris is in France.", "A recipe for soup."],
        top_n=1,
        api_base=url,
        api_key="none",
    )
    (found,) = reply.results
    return f"document {found['index']}"


def main() -> None:
    url = sys.argv[1]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:  # noqa: S310  # our own address
        model = json.load(answer)["data"][0]["id"]
    checks = (chat, chat_stream, async_stream, completion, refusal, tool, structured, responses, embeddings, rerank)
    run(f"litellm {version('litellm')}", checks, url, model)


if __name__ == "__main__":
    main()
