"""Checks of a server through langchain-openai. Needs nothing but that package.

python -m benchmarks.langchain_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from benchmarks.client_checks import missing, run

QUESTION = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]
SCHEMA: Any = {
    "title": "Capital",
    "description": "A city and its country.",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


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


def batch(model: Any, url: str) -> str:
    replies = model.batch([QUESTION, "Say hello."], config={"max_concurrency": 2})
    assert len(replies) == 2
    return " | ".join(str(reply.content)[:40] for reply in replies)


def structured(model: Any, url: str) -> str:
    try:
        found = model.with_structured_output(SCHEMA, method="json_schema", strict=True).invoke(QUESTION)
    except openai.BadRequestError as error:
        raise missing(error) from None
    assert set(found) == {"city", "country"}
    return json.dumps(found)


def tool(model: Any, url: str) -> str:
    """A tool that is forced is called."""

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    try:
        reply = model.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?")
    except openai.BadRequestError as error:
        raise missing(error) from None
    (call,) = reply.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    return json.dumps(call["args"])


def embeddings(model: Any, url: str) -> str:
    client = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model=model.model_name, check_embedding_ctx_length=False, max_retries=0
    )
    try:
        first, second = client.embed_documents(["The capital of France.", "A recipe for soup."])
    except (openai.NotFoundError, openai.BadRequestError) as error:
        raise missing(error) from None
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
    checks = (chat, chat_stream, batch, structured, tool, embeddings)
    run(f"langchain-openai {version('langchain-openai')} (openai {openai.__version__})", checks, model, url)


if __name__ == "__main__":
    main()
