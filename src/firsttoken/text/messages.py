"""Chat messages as callers send them, made into what a chat template may rely on."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from firsttoken.core.errors import InvalidRequest
from firsttoken.text.tokenizer import check_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
# By the name under which templates look for it: newer clients of vLLM's call reasoning "reasoning".
_PASSED_ON = {
    "name": "name",
    "tool_call_id": "tool_call_id",
    "reasoning": "reasoning_content",
    "reasoning_content": "reasoning_content",
}


MAX_NESTED = 50_000
"""Lists and objects in the arguments of past tool calls; some 30 ms."""


def normalize_messages(messages: Any, *, developer: bool = False) -> list[dict[str, Any]]:
    """Fresh plain dicts with ``role`` and ``content`` (always a string), and the optional fields as sent.

    Text parts are joined without anything between, so that a string and its parts give the same prompt; an
    assistant's missing content is "". A "developer" message becomes "system" unless the template knows it
    (``developer``). The arguments of past tool calls are parsed where they are JSON objects, as templates expect.
    Raises `InvalidRequest` with the path of what is wrong.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    _check_arguments(messages)
    return [_normalize(message, f"messages[{index}]", developer) for index, message in enumerate(messages)]


def _normalize(message: Any, path: str, developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} must be an object with role and content, got {_short(message)}", param=path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role is {_short(role)}; known roles are {', '.join(ROLES)}", param=f"{path}.role")
    plain: dict[str, Any] = {"role": "system" if role == "developer" and not developer else role}
    plain["content"] = _content(message.get("content"), f"{path}.content", optional=role == "assistant")
    for field, name in _PASSED_ON.items():
        value = message.get(field)
        if value is not None:
            plain[name] = _text(value, f"{path}.{field}")
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant":
            raise InvalidRequest(f"{path}.tool_calls: only an assistant calls tools", param=f"{path}.tool_calls")
        plain["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    for key, value in message.items():
        if key not in _KNOWN and value not in _EMPTY:
            field = f"{path}.{_short(key).strip(_QUOTES)}"
            raise InvalidRequest(f"{field} is not supported", param=field)
    return plain


_KNOWN = frozenset({"role", "content", "tool_calls", *_PASSED_ON})
# Clients send replies back as they got them, fields that say nothing included ("refusal": null, "annotations": []).
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_QUOTES = "'\""


def _content(content: Any, path: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return _text(content, path)
    if content is None:
        if optional:
            return ""
        raise InvalidRequest(f"{path} is missing; only an assistant's message may have none", param=path)
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{path} must be a string or a list of text parts, got {_short(content)}", param=path)
    return "".join([_part(part, f"{path}[{index}]") for index, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        what = f"type {_short(kind)}" if isinstance(part, Mapping) else _short(part)
        raise InvalidRequest(f"{path} has {what}; only text parts are supported", param=f"{path}.type")
    return _text(part.get("text"), f"{path}.text")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string, got {_short(value)}", param=path)
    check_unicode(value, param=path)
    return value


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{path} must be a list, got {_short(calls)}", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequest(f"{path} must have a function with name and arguments", param=path)
    name = _text(function.get("name"), f"{path}.function.name")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        arguments = _object_or_text(_text(arguments, f"{path}.function.arguments"))
    elif not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"{path}.function.arguments must be a JSON string, got {_short(arguments)}",
            param=f"{path}.function.arguments",
        )
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        plain["id"] = _text(call["id"], f"{path}.id")
    return plain


def _check_arguments(messages: Sequence[Any]) -> None:
    """Before any of it is parsed: a megabyte of empty lists is hundreds of thousands of objects."""
    nested = 0
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list | tuple) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                nested += arguments.count("[") + arguments.count("{")
    if nested > MAX_NESTED:
        raise InvalidRequest(
            f"the arguments of past tool calls have more than {MAX_NESTED} lists and objects, or as many brackets in "
            "texts: send fewer of these messages",
            param="messages",
        )


def _object_or_text(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short(value: Any) -> str:
    """A value as an error message may show it: valid UTF-8 and not long."""
    text = reprlib.repr(value)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def content_text(message: Mapping[str, Any]) -> str:
    """The content of a message that `normalize_messages` takes, as it would be there."""
    return _content(message.get("content"), "content", optional=True)


def count_characters(messages: Any) -> int:
    """Characters of the messages' texts, counted before anything else is done with them; what is not well-formed
    counts nothing and is refused by `normalize_messages`."""
    if not isinstance(messages, list | tuple):
        return 0
    return sum(_count(message.get("content")) for message in messages if isinstance(message, Mapping))


def _count(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list | tuple):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str))
