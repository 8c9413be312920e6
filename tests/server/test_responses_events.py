"""The pieces of an answer as items and events of a response."""

from __future__ import annotations

import json

import pytest

from firsttoken.core.plan import TokenLogprobs
from firsttoken.frontend.generation import Delta
from firsttoken.server.conversation import Said
from firsttoken.server.encode import TokenNames, to_json
from firsttoken.server.errors import unavailable
from firsttoken.server.responses.events import ResponseEvents, TokenProbabilities
from firsttoken.text.pieces import CallArguments, CallStart, Content, Reasoning
from tests.server.conftest import PIECES


def said(*pieces, finish=None, tokens=()) -> Said:
    logprobs = [TokenLogprobs(-0.5, 1) for _ in tokens]
    return Said(Delta(0, "", list(tokens), logprobs, finish, None), pieces, finish)


def read(raw: bytes) -> list[tuple[str, dict]]:
    """The events of some bytes: each one's name without "response.", and its data."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: response."), json.loads(data.removeprefix("data: "))))
    return found


def read_all(raw) -> list[tuple[str, dict]]:
    return read(b"".join(raw))


@pytest.fixture
def writer(tokenizer):
    return ResponseEvents({"id": "resp_1", "output": []}, TokenProbabilities(TokenNames(tokenizer), None))


def shown(writer) -> list[dict]:
    return json.loads(to_json(writer.output.shown()))


def items(writer) -> list[dict]:
    """What was said, without the ids."""
    return [{name: value for name, value in item.items() if name != "id"} for item in shown(writer)]


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [2, 3, 4], [4, 1, 1, 3]])
def test_thoughts_words_and_calls_are_items_of_their_own_however_they_come(writer, sizes):
    events, left = read(writer.begin()), list(PIECES)
    for size in sizes:
        taken, left = left[:size], left[size:]
        one = said(*taken)
        events += read(writer.middle(one))
    events += read_all(writer.events(said(finish="tool_calls")))
    done = {"status": "completed"}
    assert items(writer) == [
        {
            "type": "reasoning",
            **done,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Let me think."}],
        },
        {
            "type": "message",
            **done,
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I'll ask twice.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", **done, "call_id": "call_a", "name": "add", "arguments": '{"x":1}'},
        {"type": "function_call", **done, "call_id": "call_b", "name": "now", "arguments": "{}"},
    ]
    names = [name for name, _ in events]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    added = [data["item"] for name, data in events if name == "output_item.added"]
    assert [data["item"] for name, data in events if name == "output_item.done"] == shown(writer)
    assert [item["id"] for item in added] == [item["id"] for item in shown(writer)]
    assert {item["status"] for item in added} == {"in_progress"}
    assert (added[2]["name"], added[2]["arguments"]) == ("add", "")
    for data in (data for name, data in events if name.endswith(".delta")):
        assert data["item_id"] == added[data["output_index"]]["id"]


def test_what_was_open_at_a_cut_or_a_failure_is_incomplete(writer):
    list(writer.events(said(Content("done"), CallStart(0, "c", "f"), CallArguments(0, "{"))))
    name, last = read(writer.error_event(unavailable("The server stops.", "server_stopping"), None))[-1]
    assert (name, last["response"]["error"]) == ("failed", {"code": "server_error", "message": "The server stops."})
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_probabilities_go_with_the_text_of_their_tokens(tokenizer):
    writer = ResponseEvents({}, TokenProbabilities(TokenNames(tokenizer), 0))
    events = []
    for one in (
        said(Reasoning("hm"), tokens=b"hm"),
        said(Content("n"), tokens=b"n"),
        said(tokens=b"\xc3"),  # half a character has no text yet
        said(Content("é"), tokens=b"\xa9"),
        said(CallStart(0, "c", "f"), tokens=b"["),
        said(CallArguments(0, "{}"), tokens=b"{}"),
        said(Content("!"), tokens=b"!"),
        said(finish="stop", tokens=[257]),
    ):
        events += read_all(writer.events(one))
    told = [data for name, data in events if name == "output_text.delta"]
    assert [bytes(byte for one in data["logprobs"] for byte in one["bytes"]) for data in told] == [
        b"n",
        "é".encode(),
        b"!",
    ]
    ends = [data["logprobs"] for name, data in events if name == "output_text.done"]
    assert [[one["token"] for one in end] for end in ends] == [["n", "\ufffd", "\ufffd"], ["!", "<|eos|>"]]
