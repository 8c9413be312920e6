"""The official client against a real server on a free port."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest

from firsttoken.engine.stub import Fault
from firsttoken.server.config import ServerConfig
from tests.server.conftest import END, TEMPLATE, forever, say

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def url(client, serve_http):
    async with serve_http(client.app) as url:
        yield f"{url}/v1"


def sync_client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=10)


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10)


async def test_sync(url):
    def talk() -> None:
        with sync_client(url) as ai:
            assert [model.id for model in ai.models.list()] == ["stub"]
            assert ai.models.retrieve("stub").owned_by == "firsttoken"
            answer = ai.chat.completions.create(model="stub", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2)
            assert [choice.message.content for choice in answer.choices] == ["Hello, world!"] * 2
            assert answer.choices[0].logprobs.content[0].token == "H"
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
            chunks = list(ai.chat.completions.create(model="stub", messages=MESSAGES, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
            assert chunks[-1].choices[0].finish_reason == "stop"
            done = ai.completions.create(model="stub", prompt=["a", "b"], logprobs=1)
            assert [choice.text for choice in done.choices] == ["Hello, world!"] * 2
            assert done.choices[0].logprobs.tokens[0] == "H"

    await asyncio.to_thread(talk)


async def test_async(url):
    async with async_client(url) as ai:
        stream = await ai.chat.completions.create(
            model="stub", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 14
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == "Hello, world!"
        pieces = [
            chunk.choices[0].text async for chunk in await ai.completions.create(model="stub", prompt="a", stream=True)
        ]
        assert "".join(pieces) == "Hello, world!"


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_parsed_answers(make_client, serve_http):
    grammars = []

    def script(request):
        grammars.append(request.params.grammar)
        return [*b'{"name":"Ada","age":36}', END]

    async with make_client(script) as client, serve_http(client.app) as url, async_client(f"{url}/v1") as ai:
        answer = await ai.chat.completions.parse(model="stub", messages=MESSAGES, response_format=Person)
        assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
        spoken = await ai.responses.parse(model="stub", input="hi", text_format=Person)
        assert spoken.output_parsed == Person(name="Ada", age=36)
    kinds = [(grammar.kind, json.loads(grammar.source)["required"]) for grammar in grammars]
    assert kinds == [("json_schema", ["name", "age"])] * 2


async def test_the_streaming_helper(url):
    async with async_client(url) as ai, ai.chat.completions.stream(model="stub", messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world!"


async def test_responses(url):
    async with async_client(url) as ai:
        first = await ai.responses.create(model="stub", input="hi", instructions="be kind")
        assert (first.output_text, first.status, first.usage.output_tokens) == ("Hello, world!", "completed", 14)
        events = [event async for event in await ai.responses.create(model="stub", input="hi", stream=True)]
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "Hello, world!"
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        going_on = {"model": "stub", "input": [*first.output, *MESSAGES], "previous_response_id": first.id}
        async with ai.responses.stream(**going_on) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert (final.output_text, final.previous_response_id) == ("Hello, world!", first.id)
        assert (await ai.responses.retrieve(first.id)).output_text == "Hello, world!"
        listed = [item async for item in ai.responses.input_items.list(final.id, order="asc", limit=1)]
        assert [item.type for item in listed] == ["message", "message"]
        assert listed[-1].content[0].text == "hi"
        await ai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await ai.responses.create(**going_on)
        with pytest.raises(openai.BadRequestError) as bad:
            await ai.responses.create(model="stub", input="hi", background=True)
        assert bad.value.param == "background"


async def test_errors_are_the_clients_own(url):
    async with async_client(url) as ai:
        with pytest.raises(openai.NotFoundError) as missing:
            await ai.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await ai.chat.completions.create(model="stub", messages=MESSAGES, temperature=-1, stream=True)
        assert bad.value.param == "temperature"
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        with pytest.raises(openai.BadRequestError, match="chat template does not support tools"):
            await ai.chat.completions.create(model="stub", messages=MESSAGES, tools=[tool])


async def test_an_error_in_the_stream_ends_it(make_client, serve_http):
    async def read(stream) -> None:
        async for _ in stream:
            pass

    async with (
        make_client(lambda request: [*b"abc", Fault("bad luck")]) as client,
        serve_http(client.app) as url,
        async_client(f"{url}/v1") as ai,
    ):
        stream = await ai.chat.completions.create(model="stub", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="bad luck"):
            await asyncio.wait_for(read(stream), 1)


async def test_keys(make_client, serve_http):
    async with make_client(config=ServerConfig(api_keys=("sesame",))) as client, serve_http(client.app) as url:

        def talk() -> None:
            with sync_client(f"{url}/v1", "sesame") as ai:
                assert ai.chat.completions.create(model="stub", messages=MESSAGES).choices
            with sync_client(f"{url}/v1", "wrong") as ai, pytest.raises(openai.AuthenticationError):
                ai.models.list()

        await asyncio.to_thread(talk)


async def test_closing_the_stream_frees_the_engine(make_client, serve_http):
    async with make_client(forever, step_s=0.002) as client, serve_http(client.app) as url:
        async with async_client(f"{url}/v1") as ai:
            stream = await ai.completions.create(model="stub", prompt="a", max_tokens=4000, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await client.quiet()
            with pytest.raises(openai.APITimeoutError):
                await ai.with_options(timeout=0.2).completions.create(model="stub", prompt="a", max_tokens=4000)
            await client.quiet()
        assert client.llm.stats.aborted == 2


async def test_64_callers_get_their_own_text(make_client, serve_http):
    def script(request):
        return [*list(request.prompt[::4]), *b" again"]

    async with make_client(script) as client, serve_http(client.app) as url, async_client(f"{url}/v1") as ai:

        async def ask(name: str) -> str:
            stream = await ai.completions.create(model="stub", prompt=name, max_tokens=64, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        names = [f"caller {number}" for number in range(64)]
        assert await asyncio.gather(*map(ask, names)) == [f"{name} again" for name in names]


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}


def calls_of(names: tuple[str, ...]) -> str:
    calls = ({"name": name, "arguments": {"city": "Tōkyō"}} for name in names)
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


async def test_tools(make_client, serve_http):
    names = ("get_weather", "get_time")
    template = TEMPLATE + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    script = say("Let me see.\n" + calls_of(names))
    async with (
        make_client(script, template=template) as client,
        serve_http(client.app) as url,
        async_client(f"{url}/v1") as ai,
    ):
        asked = {"model": "stub", "messages": MESSAGES, "tools": [WEATHER, TIME]}
        message = (await ai.chat.completions.create(**asked)).choices[0].message
        assert message.content == "Let me see."
        assert [call.function.name for call in message.tool_calls] == list(names)
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Tōkyō"}] * 2
        async with ai.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, json.loads(event.arguments)) for event in done] == [
            (name, {"city": "Tōkyō"}) for name in names
        ]
        assert final.choices[0].finish_reason == "tool_calls"
        results = [{"role": "tool", "tool_call_id": call.id, "content": "18"} for call in message.tool_calls]
        again = [*MESSAGES, message, *results]
        reply = await ai.chat.completions.create(**asked | {"messages": again, "parallel_tool_calls": False})
        assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["get_weather"]


class GetTime(pydantic.BaseModel):
    city: str


async def test_named_and_strict_tools(make_client, serve_http):
    held = []

    def script(request):
        held.append(request.params.grammar is not None)
        return [*calls_of(("GetTime",)).encode(), END]

    template = TEMPLATE + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    async with (
        make_client(script, template=template) as client,
        serve_http(client.app) as url,
        async_client(f"{url}/v1") as ai,
    ):
        tool = openai.pydantic_function_tool(GetTime)
        for choice in ("auto", "required", {"type": "function", "function": {"name": "GetTime"}}):
            completion = await ai.chat.completions.parse(
                model="stub", messages=MESSAGES, tools=[tool], tool_choice=choice
            )
            (call,) = completion.choices[0].message.tool_calls
            assert call.function.parsed_arguments == GetTime(city="Tōkyō")
        loose = {"type": "function", "function": {"name": "GetTime"}}
        await ai.chat.completions.create(model="stub", messages=MESSAGES, tools=[loose])
    assert held == [True, True, True, False]
