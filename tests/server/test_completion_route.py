"""Completions: every form of a prompt, several prompts, echo, and the legacy log-probabilities."""

from __future__ import annotations

import pytest

from tests.server.conftest import forever
from tests.support.byte_tokenizer import EOS as END


def texts(reply) -> dict[int, str]:
    """The text of each choice of a streamed answer."""
    found: dict[int, str] = {}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def shout(request):
    """Answers with the prompt's bytes and "!"."""
    from array import array

    return [*(token for token in array("I", request.prompt) if token < 256), ord("!"), END]


async def test_whole_answer(client):
    body = (await client.complete("hi", model="stub")).json
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["text"] == "Hello, world!"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 14


async def test_at_most_16_tokens_unless_asked(make_client):
    async with make_client(lambda request: [ord("x")] * 100) as client:
        assert (await client.complete()).json["choices"][0]["text"] == "x" * 16
        assert (await client.complete(max_tokens=None)).json["choices"][0]["text"] == "x" * 16
        assert (await client.complete(max_tokens=20.0)).json["choices"][0]["text"] == "x" * 20


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]], [104.0, 105.0]])
async def test_forms_of_one_prompt(make_client, prompt):
    async with make_client(shout) as client:
        reply = await client.complete(prompt)
        assert reply.json["choices"][0]["text"] == "hi!"
        assert reply.json["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("prompt", [["a", "bc", "def"], [[97], [98, 99], [100, 101, 102]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(make_client, prompt, stream):
    async with make_client(shout) as client:
        reply = await client.complete(prompt, n=2, stream=stream)
        wanted = ["a!", "a!", "bc!", "bc!", "def!", "def!"]
        if stream:
            assert texts(reply) == dict(enumerate(wanted))
            ends = [
                choice["index"] for event in reply.events[:-1] for choice in event["choices"] if choice["finish_reason"]
            ]
            assert sorted(ends) == list(range(6))
            return
        assert [choice["text"] for choice in reply.json["choices"]] == wanted
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(6))
        assert reply.json["usage"]["prompt_tokens"] == 6
        assert reply.json["usage"]["completion_tokens"] == 2 * (3 + 4 + 5)


@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169]])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(client, prompt, stream):
    reply = await client.complete(prompt, echo=True, n=2, stream=stream)
    found = texts(reply) if stream else {choice["index"]: choice["text"] for choice in reply.json["choices"]}
    assert found == {0: "héHello, world!", 1: "héHello, world!"}


@pytest.mark.parametrize("stream", [False, True])
async def test_legacy_logprobs(client, stream):
    reply = await client.complete(logprobs=1, stream=stream, max_tokens=3)
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in reply.events[:-1]]
        joined = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    else:
        joined = reply.json["choices"][0]["logprobs"]
    assert joined["tokens"] == ["H", "e", "l"]
    assert joined["token_logprobs"] == [-0.5] * 3
    assert joined["top_logprobs"] == [{"H": -0.5}, {"e": -0.5}, {"l": -0.5}]
    assert joined["text_offset"] == [0, 1, 2]


async def test_pieces_of_characters_have_distinct_names(make_client):
    async with make_client(lambda request: [*"é".encode(), END]) as client:
        logprobs = (await client.complete(logprobs=0)).json["choices"][0]["logprobs"]
        assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_stream_ends_with_usage_and_done(client):
    reply = await client.complete(["a", "b"], stream=True, stream_options={"include_usage": True})
    assert reply.events[-1] == "[DONE]"
    assert reply.events[-2]["choices"] == []
    assert reply.events[-2]["usage"] == (await client.complete(["a", "b"])).json["usage"]


async def test_token_ids_when_asked(client):
    body = (await client.complete("hi", return_token_ids=True, max_tokens=1)).json
    assert body["choices"][0]["token_ids"] == [72]
    assert body["choices"][0]["prompt_token_ids"] == [104, 105]
    first = (await client.complete("hi", return_token_ids=True, max_tokens=1, stream=True)).events[0]
    assert first["choices"][0]["prompt_token_ids"] == [104, 105]


async def test_one_bad_prompt_refuses_all(client):
    reply = await client.complete([[104], [9999]])
    assert reply.status == 400
    assert "9999" in reply.error["message"]
    await client.quiet()


async def test_one_failing_prompt_ends_all(make_client):
    from firsttoken.engine.stub import Fault

    def script(request):
        return [Fault("bad luck")] if len(request.prompt) == 4 else [ord("x")] * 3000

    async with make_client(script, step_s=0.001) as client:
        reply = await client.complete([[104, 104], [104]], max_tokens=3000)
        assert (reply.status, reply.error["code"]) == (500, "generation_failed")
        await client.quiet()


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "bad", [[], [99_999_999], [97] * 5000, "x" * 5000], ids=["empty", "unknown id", "long", "long text"]
)
async def test_an_error_says_which_prompt_is_wrong(make_client, bad, echo):
    good = "hi" if isinstance(bad, str) else [104, 105]
    async with make_client(forever, step_s=0.005) as client:
        reply = await client.complete([good, good, bad, good], echo=echo, max_tokens=4000)
        assert (reply.status, reply.error["param"]) == (400, "prompt[2]")
        assert reply.error["message"].startswith("prompt[2]")
        alone = await client.complete([bad] if isinstance(bad, str) else bad, echo=echo)
        assert (alone.status, alone.error["param"]) == (400, "prompt")
        await client.quiet()
        assert client.llm.stats.finished == 0
