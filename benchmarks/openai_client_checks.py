"""Checks of a server through the official openai client, whatever its version. Needs nothing but that package.

python -m benchmarks.openai_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import openai

from benchmarks import openai_held_checks as held
from benchmarks.client_checks import QUESTION, run


def chat(client: openai.OpenAI, model: str) -> str:
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.choices[0].finish_reason in ("stop", "length")
    return reply.choices[0].message.content or ""


def chat_stream(client: openai.OpenAI, model: str) -> str:
    """The stream's text equals the whole answer's, and usage comes last."""
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert text == chat(client, model)
    return text


def completion(client: openai.OpenAI, model: str) -> str:
    """Streamed and whole."""
    asked: Any = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    whole: str = client.completions.create(**asked).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == whole
    return whole


def several_answers(client: openai.OpenAI, model: str) -> str:
    reply = client.chat.completions.create(model=model, messages=QUESTION, n=3, seed=1, temperature=1, max_tokens=8)
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]
    return f"{len({choice.message.content for choice in reply.choices})} different ones of 3"


def logprobs(client: openai.OpenAI, model: str) -> str:
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert all(one.token == one.top_logprobs[0].token for one in found.content)
    return f"{len(found.content)} tokens"


def response(client: openai.OpenAI, model: str) -> str:
    """The events' text equals the whole answer's, and a conversation goes on from one that is kept."""
    asked: Any = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 32}
    first = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == first.output_text == chat(client, model)
    second = client.responses.create(**asked | {"input": "And of Italy?", "previous_response_id": first.id})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    told: str = second.output_text
    return told


def response_kept(client: openai.OpenAI, model: str) -> str:
    """A response can be had again, with its input, until it is deleted."""
    first = client.responses.create(model=model, input="Say hello.", temperature=0, max_output_tokens=8)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = client.responses.input_items.list(first.id).data
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError as error:
        return f"{len(items)} item; then {error.message}"
    raise AssertionError("a deleted response was found")


def embeddings(client: openai.OpenAI, model: str) -> str:
    """As numbers, and as the client asks for them by itself (base64)."""
    texts = ["The capital of France.", "A recipe for soup."]
    packed = client.embeddings.create(model=model, input=texts)
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert max(abs(x - y) for x, y in zip(one.embedding, other.embedding, strict=True)) < 1e-6
    assert len(client.embeddings.create(model=model, input=texts[0], dimensions=64).data[0].embedding) == 64
    assert packed.usage.prompt_tokens > 0
    return f"{len(packed.data[0].embedding)} dimensions"


def models(client: openai.OpenAI, model: str) -> str:
    assert [one.id for one in client.models.list()] == [model]
    return client.models.retrieve(model).owned_by


def refusal(client: openai.OpenAI, model: str) -> str:
    try:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    except openai.BadRequestError as error:
        if "temperature" not in error.message:
            raise AssertionError(f"the refusal does not name temperature: {error.message}") from None
        return f"{type(error).__name__}: {error.message}"
    raise AssertionError("temperature -1 was accepted")


def unknown_model(client: openai.OpenAI, model: str) -> str:
    try:
        client.chat.completions.create(model=f"not-{model}", messages=QUESTION)
    except openai.NotFoundError as error:
        return f"{type(error).__name__}: {error.message}"
    raise AssertionError("an unknown model was accepted")


def async_stream(client: openai.OpenAI, model: str) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as other:
            stream = await other.chat.completions.create(
                model=model, messages=QUESTION, temperature=0, max_tokens=32, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return asyncio.run(ask())


CHECKS: tuple[Callable[[openai.OpenAI, str], str], ...] = (
    chat,
    chat_stream,
    completion,
    several_answers,
    logprobs,
    response,
    response_kept,
    embeddings,
    models,
    refusal,
    unknown_model,
    async_stream,
    *held.CHECKS,
)


def main() -> None:
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0) as client:
        run(f"openai {openai.__version__}", CHECKS, client, client.models.list().data[0].id)


if __name__ == "__main__":
    main()
