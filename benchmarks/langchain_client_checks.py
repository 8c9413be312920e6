"""Checks of a server through langchain-openai. Needs nothing but that package.

python -m benchmarks.langchain_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Annotated, Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from benchmarks.client_checks import CAPITAL, TOOL, called, held, run

QUESTION = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]
ASK = HumanMessage("What is the weather in Paris?")


class Capital(BaseModel):
    """A city and its country."""

    city: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]


def chat(model: Any, url: str) -> str:
    reply = model.invoke(QUESTION)
    used = reply.usage_metadata
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert reply.response_metadata["finish_reason"] in ("stop", "length")
    return str(reply.content)


def chat_stream(model: Any, url: str) -> str:
    """The pieces add up to the whole answer, and the last of them has the usage."""
    chunks = list(model.stream(QUESTION))
    text = "".join(str(chunk.content) for chunk in chunks)
    assert text == chat(model, url)
    assert any(chunk.usage_metadata for chunk in chunks), "no chunk has the usage"
    return text


def async_stream(model: Any, url: str) -> str:
    async def ask() -> str:
        return "".join([str(chunk.content) async for chunk in model.astream(QUESTION)])

    return asyncio.run(ask())


def batch(model: Any, url: str) -> str:
    replies = model.batch([QUESTION, "Say hello."], config={"max_concurrency": 2})
    assert len(replies) == 2
    return " | ".join(str(reply.content)[:40] for reply in replies)


def completion(model: Any, url: str) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", model=model.model_name, temperature=0, max_tokens=4)
    return str(client.invoke("The capital of France is"))


def structured(model: Any, url: str) -> str:
    """By a schema, by a pydantic class, by a function that must be called, and as any object; streamed, too."""
    found = model.with_structured_output(CAPITAL, method="json_schema", strict=True).invoke(QUESTION)
    by_class = model.with_structured_output(Capital)
    told = by_class.invoke(QUESTION)
    assert isinstance(told, Capital)
    assert list(by_class.stream(QUESTION))[-1] == told
    by_call = model.with_structured_output(Capital, method="function_calling").invoke(QUESTION)
    assert isinstance(by_call, Capital)
    assert isinstance(model.with_structured_output(None, method="json_mode").invoke("Say JSON."), dict)
    return held(found)


def tool(model: Any, url: str) -> str:
    """A tool that is forced is called, streamed and whole; and its result is answered."""
    bound = model.bind_tools([TOOL], tool_choice="get_weather")
    reply = bound.invoke([ASK])
    (call,) = reply.tool_calls
    told = called(call["name"], call["args"])
    (streamed,) = reduce(add, bound.stream([ASK])).tool_calls
    assert streamed["args"] == call["args"]
    result = ToolMessage("sunny, 21 degrees", tool_call_id=call["id"])
    after = model.bind_tools([TOOL], tool_choice="none").invoke([ASK, reply, result])
    assert not after.tool_calls
    return f"{told}, then {after.content!r:.60}"


def tool_of_function(model: Any, url: str) -> str:
    """A Python function as a tool, and that any of the tools must be called."""

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    reply = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke([ASK])
    (call,) = reply.tool_calls
    assert call["name"] == "get_weather"
    return json.dumps(call["args"])[:100]


def responses(model: Any, url: str) -> str:
    """The same by the responses route: a text, a stream, a call, an object."""
    other: Any = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model.model_name,
        temperature=0,
        max_tokens=96,
        max_retries=0,
        use_responses_api=True,
    )
    whole = other.invoke(QUESTION)
    assert reduce(add, other.stream(QUESTION)).text == whole.text
    (call,) = other.bind_tools([TOOL], tool_choice="get_weather").invoke([ASK]).tool_calls
    called(call["name"], call["args"])
    assert isinstance(other.with_structured_output(Capital).invoke(QUESTION), Capital)
    return str(whole.text)


def embeddings(model: Any, url: str) -> str:
    client = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model=model.model_name, check_embedding_ctx_length=False, max_retries=0
    )
    first, second = client.embed_documents(["The capital of France.", "A recipe for soup."])
    assert len(first) == len(second) > 1
    assert first != second
    return f"{len(first)} dimensions"


def main() -> None:
    url = sys.argv[1]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        name = client.models.list().data[0].id
    model: Any = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=name, temperature=0, max_tokens=96, max_retries=0, stream_usage=True
    )
    checks = (chat, chat_stream, async_stream, batch, completion, structured, tool, tool_of_function, responses)
    told = f"langchain-openai {version('langchain-openai')} (openai {openai.__version__})"
    run(told, (*checks, embeddings), model, url)


if __name__ == "__main__":
    main()
