"""What a chat request tells the template beside its messages: how much to think, and that the last message goes on."""

from __future__ import annotations

from array import array

import pytest

from tests.server.conftest import END, TEMPLATE, say
from tests.server.test_tools import THINKING, TOOL_TEMPLATE, both

TURNS = (
    "{% for m in messages %}<|bos|>{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|bos|>assistant:{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
)
ASKED = {"role": "user", "content": "2+2?"}


def prefill(content, **fields) -> dict:
    return {"messages": [ASKED, {"role": "assistant", "content": content}], "continue_final_message": True, **fields}


@pytest.fixture
def prompts():
    """The prompts that the engine got, as text with its control tokens as blanks."""
    return []


@pytest.fixture
def noting(make_client, prompts):
    def make(text: str = "ok", **options):
        def script(request):
            prompts.append("".join(chr(token) if token < 256 else " " for token in array("I", request.prompt)))
            return [*text.encode(), END]

        return make_client(script, **options)

    return make


@pytest.mark.parametrize("content", ["The answer", "The answer is ", "", [{"type": "text", "text": "The answer"}]])
async def test_the_last_message_goes_on(noting, prompts, content):
    async with noting(template=TURNS) as client:
        reply = await client.post("/v1/chat/completions", prefill(content))
        assert reply.json["choices"][0]["message"]["content"] == "ok"
        text = content if isinstance(content, str) else content[0]["text"]
        assert prompts == [f" user:2+2?  assistant:{text}"]
        ids = (await client.post("/tokenize", prefill(content))).json["count"]
        assert ids == reply.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_tells_the_beginning_too(noting, stream):
    async with noting(" is 4", template=TURNS) as client:
        reply = await client.post("/v1/chat/completions", prefill("The answer", echo=True, n=2, stream=stream))
        if stream:
            found = [choice for event in reply.events[:-1] for choice in event["choices"]]
            texts = [
                "".join(one["delta"].get("content", "") for one in found if one["index"] == index) for index in (0, 1)
            ]
        else:
            texts = [choice["message"]["content"] for choice in reply.json["choices"]]
        assert texts == ["The answer is 4"] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [ASKED], "continue_final_message": True}, "continue_final_message"),
        (prefill("a", add_generation_prompt=True), "continue_final_message"),
        ({"messages": [ASKED], "echo": True}, "echo"),
        ({"messages": [ASKED], "reasoning_effort": "very"}, "reasoning_effort"),
        ({"messages": [ASKED], "enable_thinking": False}, "enable_thinking"),
        (
            {"messages": [ASKED], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
        ),
    ],
)
async def test_what_cannot_be_is_refused(noting, fields, param):
    async with noting(template=TURNS) as client:
        reply = await client.post("/v1/chat/completions", fields)
        assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_template_that_does_not_write_the_last_message_is_named(make_client):
    async with make_client(template="{{ messages[0].content }}") as client:
        reply = await client.post("/v1/chat/completions", prefill("a"))
        assert (reply.status, reply.error["param"]) == (400, "continue_final_message")


async def test_the_effort_goes_to_a_template_that_reads_it(noting, prompts):
    async with noting(template=TURNS) as client:
        await client.chat("hi", reasoning_effort="low")
        assert prompts == [" user:hi  assistant:effort low"]


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"enable_thinking": False}])
async def test_thinking_can_be_turned_off(noting, prompts, fields):
    async with noting("a</think>b", template=THINKING) as client:
        message, _ = await both(client, **fields)
        assert message["content"] == "a</think>b"
        assert prompts[0].endswith("<think></think>")
        message, _ = await both(client, enable_thinking=True)
        assert (message["reasoning_content"], message["content"]) == ("a", "b")


async def test_no_effort_is_what_a_model_without_thought_makes_anyhow(client):
    assert (await client.chat(reasoning_effort="none")).status == 200


async def test_a_model_that_always_thinks_cannot_be_told_not_to(make_client):
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    async with make_client(say("Hm.</think>Yes."), template=template) as client:
        message, _ = await both(client)
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        reply = await client.chat(reasoning_effort="none")
        assert (reply.status, reply.error["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("<think>\nFirst", "a", "b"), ("<think>First</think> So", None, "a</think>b"), ("So", None, "a</think>b")],
)
async def test_reasoning_goes_on_where_the_last_message_left_it_open(make_client, begun, reasoning, content):
    async with make_client(say("a</think>b"), template=THINKING) as client:
        reply = await client.post("/v1/chat/completions", prefill(begun))
        message = reply.json["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_past_reasoning_is_told_to_the_template(noting, prompts, name):
    past = {"role": "assistant", "content": "4", name: "2 and 2"}
    async with noting(template=TURNS) as client:
        await client.post("/v1/chat/completions", {"messages": [ASKED, past, ASKED]})
        assert "assistant:(2 and 2)4" in prompts[0]


async def test_tokenize_counts_tools(make_client):
    tool = {"type": "function", "function": {"name": "f"}}
    async with make_client(template=TOOL_TEMPLATE) as client:
        body = {"messages": [ASKED], "tools": [tool]}
        asked = (await client.post("/v1/chat/completions", body)).json["usage"]["prompt_tokens"]
        assert (await client.post("/tokenize", body)).json["count"] == asked
