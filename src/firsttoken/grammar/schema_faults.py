"""Where a JSON schema says what answers cannot be held to: the library tells what, and not where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.structured_outputs import schema_grammar
from firsttoken.grammar.source import check

# What others refer to comes first: there it is wrong, and not where it is referred to.
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
# Parts of one schema that are looked at, some 0.1 ms each.
_MOST_LOOKS = 512
_PLAIN = re.compile(r"[A-Za-z_$][\w$-]*")


def schema_fault(schema: dict[str, Any]) -> tuple[str, str] | None:
    """The place of what is wrong, as ``.properties.a`` ("" for the schema itself), and what is; None where a text can
    be held to it. The place is that of the innermost part that is wrong by itself in the same way."""
    message = _message(schema)
    if message is None:
        return None
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, looks = "", _MOST_LOOKS
    within = _parts(schema)
    while looks and (found := next(within, None)) is not None:
        looks -= 1
        step, part = found
        if _message({**shared, **part}) == message:
            place += step
            within = _parts(part)
    return place, message


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _MAPS:
        given = schema.get(name)
        for key, part in given.items() if isinstance(given, dict) else ():
            if isinstance(part, dict):
                yield f".{name}{f'.{key}' if _PLAIN.fullmatch(key) else f'[{key!r:.80}]'}", part
    for name in _LISTS:
        given = schema.get(name)
        for index, part in enumerate(given if isinstance(given, list) else ()):
            if isinstance(part, dict):
                yield f".{name}[{index}]", part
    for name in _ONES:
        part = schema.get(name)
        if isinstance(part, dict):
            yield f".{name}", part


def _message(schema: dict[str, Any]) -> str | None:
    try:
        check(schema_grammar(msgspec.json.encode(schema).decode()))
    except InvalidRequest as error:
        return error.message
    return None
