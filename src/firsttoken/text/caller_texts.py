"""All texts that a caller of a chat sent: in messages, in tools, in variables for the template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from firsttoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from firsttoken.text.control_tokens import Twins

MAX_DEPTH = 64
"""Of lists and objects in each other; schemas of tools that people write are a tenth as deep."""
MAX_VALUES = 100_000
"""Of tools, arguments of past calls and variables for the template, all together."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


def caller_texts(messages: Messages, tools: Tools, template_kwargs: Mapping[str, Any]) -> list[str]:
    """The texts, names of fields included, in no order. Raises `InvalidRequest`, naming the field, for values that
    are too deep in each other or too many."""
    texts: list[str] = []
    nested: list[tuple[str, Any]] = []
    for message in messages:
        for value in message.values():
            if isinstance(value, str):
                texts.append(value)
            else:
                nested.append(("messages", value))
    if tools:
        nested.append(("tools", tools))
    if template_kwargs:
        nested.append(("chat_template_kwargs", template_kwargs))
    left = MAX_VALUES
    for field, value in nested:
        left = _gather(value, texts, field, left)
    return texts


def check_nesting(value: Any, field: str) -> None:
    """Raises `InvalidRequest`, naming the field, for a value that is too deep or holds too many."""
    _gather(value, [], field, MAX_VALUES)


def _gather(value: Any, texts: list[str], field: str, left: int) -> int:
    stack = [(value, 0)]
    while stack:
        one, depth = stack.pop()
        if isinstance(one, str):
            texts.append(one)
            continue
        if isinstance(one, Mapping):
            texts += [key for key in one if isinstance(key, str)]
            one = one.values()
        elif not isinstance(one, list | tuple):
            continue
        left -= len(one)
        if depth >= MAX_DEPTH or left < 0:
            deep, many = f"that are nested more than {MAX_DEPTH} deep", f"of more than {MAX_VALUES} values"
            what = deep if depth >= MAX_DEPTH else many
            raise InvalidRequest(f"{field} has lists or objects {what}; send less", param=field)
        stack += [(inner, depth + 1) for inner in one]
    return left


def with_twins(
    messages: Messages, tools: Tools, template_kwargs: Mapping[str, Any], twins: Twins
) -> tuple[list[dict[str, Any]], list[Any] | None, dict[str, Any]]:
    """The same values with ``twins``. A template may look into what the model said before, as for where its thoughts
    end, and at its own variables; what others wrote tells it nothing."""
    marked = []
    for message in messages:
        mark = twins.seen if message["role"] == "assistant" else twins.opaque
        marked.append({key: one if key == "role" else _mapped(one, mark, twins.name) for key, one in message.items()})
    return (
        marked,
        None if tools is None else [_mapped(one, twins.opaque, twins.name) for one in tools],
        {key: _mapped(one, twins.seen, twins.name) for key, one in template_kwargs.items()},
    )


def _mapped(value: Any, text: Callable[[str], str], name: Callable[[str], str]) -> Any:
    """A value no deeper than `MAX_DEPTH`."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {name(key) if isinstance(key, str) else key: _mapped(one, text, name) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(one, text, name) for one in value]
    return value
