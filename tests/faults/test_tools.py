"""Tool calls: the same however they arrive, and never promised without being there."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import say
from tests.server.test_tools import TOOL, TOOL_TEMPLATE, joined, without_ids

CALL = 'Sure.<tool_call>{"name":"get_weather","arguments":{"city":"Tōkyō"}}</tool_call>'


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 7, 11, 13, 17, 23, 31, 64, 200])
async def test_bb11_a_call_is_the_same_however_many_tokens_come_at_once(make_client, tokens_per_step):
    """From one token a piece to all in one: its name, its id, its arguments and the text before it."""
    async with make_client(say(CALL), template=TOOL_TEMPLATE, tokens_per_step=tokens_per_step) as client:
        whole = (await client.chat(tools=[TOOL])).json["choices"][0]
        message, finish = joined((await client.chat(tools=[TOOL], stream=True)).events)
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == finish == "tool_calls"
    assert whole["message"]["content"] == "Sure."
    assert json.loads(call["function"]["arguments"]) == {"city": "Tōkyō"}
    assert "Tōkyō" in call["function"]["arguments"], "letters are not escaped on the way"
    assert without_ids(message) == without_ids(whole["message"])
    assert message["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    "said", ["Prose.", "<tool_call>", '<tool_call>{"name":"other","arguments":{}}</tool_call>', ""]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bb06_no_answer_without_calls_ends_with_tool_calls(make_client, said, stream):
    async with make_client(say(said), template=TOOL_TEMPLATE) as client:
        reply = await client.chat(tools=[TOOL], stream=stream)
        events = reply.events[:-1] if stream else [reply.json]
        assert reply.status == 200
        assert [one["choices"][0]["finish_reason"] for one in events][-1] == "stop"
        assert all(not one["choices"][0].get("message", {}).get("tool_calls") for one in events)
