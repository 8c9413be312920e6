"""From items to the messages of a chat. Nothing here knows requests, stores or the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from firsttoken.server.decode import as_type, check_size, decode_json, is_absent
from firsttoken.server.errors import bad_request
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.responses.schema import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
)
from firsttoken.text.caller_texts import check_nesting

INPUT = "input"

_INPUT: msgspec.json.Decoder[str | list[dict[str, Any]]] = msgspec.json.Decoder(str | list[dict[str, Any]])
_REFUSED = {
    kind: refused_fields(kind) for kind in (MessageItem, FunctionCallItem, FunctionOutputItem, ReasoningItem, InputText)
}


def decode_input(raw: msgspec.Raw, limit: int, max_items: int) -> list[Item]:
    """The items of ``input``; a text is what the user says. Raises `ApiError` 400 that names the place."""
    if is_absent(raw):
        raise bad_request("input is required: text, or a list of items", INPUT, "missing_parameter")
    check_size(raw, limit, INPUT)
    found = decode_json(_INPUT, raw, INPUT)
    if isinstance(found, str):
        return [MessageItem(role="user", content=found)]
    if not found:
        raise bad_request("input is empty: send at least one item", INPUT, "empty_input")
    if len(found) > max_items:
        raise bad_request(f"input holds {len(found)} items; at most {max_items}", INPUT)
    items = as_items(found, INPUT)
    for index, item in enumerate(items):
        _refuse(item, f"{INPUT}[{index}].")
    return items


def as_items(found: list[dict[str, Any]], at: str) -> list[Item]:
    """Plain JSON as items. Raises `ApiError` 400 that names a place of ``at``."""
    for one in found:
        if one.get("type") is None:
            one["type"] = "message"
    return as_type(found, list[Item], at)


def _refuse(item: Item, path: str) -> None:
    refuse_unimplemented(item, _REFUSED[type(item)], path)
    if isinstance(item, MessageItem) and not isinstance(item.content, str):
        for index, part in enumerate(item.content):
            if isinstance(part, InputText):
                refuse_unimplemented(part, _REFUSED[InputText], f"{path}content[{index}].")
            elif isinstance(part, OutputText):
                # Nobody reads these, but they are told again, from where less depth can be read than here.
                for name in ("annotations", "logprobs"):
                    check_nesting(getattr(part, name), f"{path}content[{index}].{name}")


def to_messages(items: Sequence[Item], before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """What chat has in their place, behind the messages ``before``. What the assistant thought, said and called in one
    go is one message. Raises `ApiError` 400: an output of a call that nobody made."""
    chat = _Chat(before)
    for index, item in enumerate(items):
        chat.add(item, f"{INPUT}[{index}]")
    return chat.messages


class _Chat:
    def __init__(self, before: Sequence[dict[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's message that may still grow
        self._calls = {call["id"] for message in before for call in message.get("tool_calls", ())}

    def say(self, role: str, content: str, **more: str) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self._turn = None

    def add(self, item: Item, path: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                turn = self._grown("content")
                turn["content"] = _text(item.content)
            case MessageItem():
                self.say(item.role, _text(item.content))
            case ReasoningItem():
                turn = self._grown("reasoning_content", "content", "tool_calls")
                thought = item.content or item.summary or ()
                turn["reasoning_content"] = "".join([part.text for part in thought])
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls = self._grown().setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
                self._calls.add(item.call_id)
            case FunctionOutputItem():
                if item.call_id not in self._calls:
                    raise bad_request(
                        f"{path}.call_id {item.call_id!r:.80} is that of no function_call before it: send the call too",
                        f"{path}.call_id",
                    )
                named = {"name": item.name} if item.name is not None else {}
                self.say("tool", _text(item.output), tool_call_id=item.call_id, **named)
            case _:
                assert_never(item)

    def _grown(self, *taken: str) -> dict[str, Any]:
        """The assistant's message that is to grow: a new one where the latest has any of the fields ``taken``."""
        if self._turn is None or any(field in self._turn for field in taken):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    """Parts are joined without anything between, as in chat."""
    if isinstance(content, str):
        return content
    return "".join([part.refusal if isinstance(part, Refusal) else part.text for part in content])
