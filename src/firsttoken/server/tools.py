"""The tools that a caller offers, in no API's words: checked, and made ready for the template, the reader of the answer
and, where a call is forced, the grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firsttoken.server.encode import to_json
from firsttoken.server.errors import bad_request
from firsttoken.text.tools.formats import MAX_NAME
from firsttoken.text.tools.reader import Offer

MAX_TOOLS = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. ``parameters`` is the JSON schema of its arguments; ``strict``: they must keep to it. ``place`` is
    what errors call it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    place: str = "tools"

    def definition(self) -> dict[str, Any]:
        """As templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """In the order in which it was given, which a model reads."""
        schema = dict(self.parameters or {})
        for name, usual in (("type", "object"), ("properties", {})):
            schema.setdefault(name, usual)
        return schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools`` may be called; with ``forced`` at least one must be. ``only``: no other than the one of this name."""

    tools: Sequence[Tool]
    forced: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> list[Tool]:
        return [tool for tool in self.tools if self.only in (None, tool.name)]

    def definitions(self) -> list[dict[str, Any]]:
        return [tool.definition() for tool in self.tools]

    def offer(self) -> Offer:
        return Offer({tool.name: tool.schema for tool in self.callable}, self.parallel)


def check_tools(tools: Sequence[Tool], limit: int) -> None:
    """Raises `ApiError` 400 that names the place: too many, too large (``limit`` bytes of JSON in all), a name twice or
    of another form than models write, parameters that are no schema of an object."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools holds {len(tools)} tools; at most {MAX_TOOLS}", "tools")
    seen: set[str] = set()
    for tool in tools:
        at = f"{tool.place}.name"
        if _NAME.fullmatch(tool.name) is None:
            raise bad_request(
                f"{at} {tool.name!r:.100} must be 1 to {MAX_NAME} letters, digits, dots, underscores and dashes", at
            )
        if tool.name in seen:
            raise bad_request(f"{at}: there are two tools called {tool.name!r}; give each its own name", at)
        seen.add(tool.name)
        _check_schema(tool.parameters or {}, f"{tool.place}.parameters")
    size = sum(len(to_json(tool.definition())) for tool in tools)
    if size > limit:
        raise bad_request(
            f"tools take {size} bytes of JSON, more than this model's context can hold ({limit} at most); offer fewer",
            "tools",
            "context_length_exceeded",
        )


def _check_schema(schema: Mapping[str, Any], at: str) -> None:
    kind = schema.get("type", "object")
    if kind != "object":
        raise bad_request(f"{at}.type must be 'object', got {kind!r:.100}: arguments have names", f"{at}.type")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise bad_request(f"{at}.properties must be an object: a schema by name", f"{at}.properties")
    for name, one in properties.items():
        if not isinstance(one, dict | bool):
            place = f"{at}.properties.{name:.64}"
            raise bad_request(f"{place} must be a schema, an object, got {one!r:.100}", place)
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(one, str) for one in required)):
        raise bad_request(f"{at}.required must be a list of names, got {required!r:.100}", f"{at}.required")
