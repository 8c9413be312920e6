"""The document, made of the structs that the server decodes with, `fields` and `operations`."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from firsttoken.server.auth import is_open
from firsttoken.server.encode import to_json
from firsttoken.server.openapi.operations import OPERATIONS, REDIRECT, Operation, Parameter
from firsttoken.server.openapi.structs import Described
from firsttoken.server.query import check_query
from firsttoken.version import __version__

_REF = "#/components/schemas/{name}"
_REASONS = {
    400: "The request is wrong: `param` names the field, `message` says what to do.",
    401: "No valid API key.",
    403: "The API key may not have what the request asks for.",
    404: "There is no such model, request or file.",
    408: "The body did not come.",
    413: "The body is too large.",
    415: "The body is encoded in a way that is not supported.",
    429: "Too much goes before it, or the quota of its key is used up: `Retry-After` says when to come back.",
    500: "The server failed.",
    503: "The server cannot answer now: `Retry-After` says when to come back.",
    504: "It could not start within `deadline_ms`.",
}
_INTRODUCTION = (
    "An inference engine behind OpenAI's API. A field that is not described here is refused with a 400 that names it; "
    "null means the same as to leave a field out."
)
_EVENTS = (
    "Server-sent events: each `data:` line holds one object (`contentSchema`), or where the stream fails an error and "
    "nothing after it; that of a completion ends with `data: [DONE]`."
)
_SCHEME = {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."}


class OpenApi:
    """``GET /openapi.json``. ``keys``: whether the server asks for API keys."""

    def __init__(self, *, keys: bool) -> None:
        self._keys = keys
        self._made: bytes | None = None

    def route(self) -> Route:
        return Route("/openapi.json", self._answer, methods=["GET"])

    async def _answer(self, request: Request) -> Response:
        check_query(request)
        if self._made is None:
            self._made = to_json(await asyncio.to_thread(document, keys=self._keys))
        return Response(self._made, media_type="application/json")


def document(*, keys: bool = False) -> dict[str, Any]:
    """The document as a dict; some milliseconds. Raises `LookupError` naming a field that is not described."""
    described = Described()
    takes = {one.takes: described.struct(one.takes) for one in OPERATIONS if one.takes is not None}
    answers = [kind for one in OPERATIONS for kind in (one.answer, one.event) if not isinstance(kind, str | None)]
    named = list(dict.fromkeys([*takes.values(), *answers, *(one.error for one in OPERATIONS)]))
    made, components = msgspec.json.schema_components(named, ref_template=_REF)
    schemas: dict[Any, Any] = dict(zip(named, made, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        body = None if one.takes is None else schemas[takes[one.takes]]
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, body, schemas, keys)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "firsttoken", "version": __version__, "description": _INTRODUCTION},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": _SCHEME}
        found["security"] = [{"key": []}]
    return found


def _operation(one: Operation, body: Any, schemas: dict[Any, Any], keys: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": _identifier(one),
        "summary": one.summary,
        "tags": [one.tag],
        "responses": _responses(one, schemas, keys),
    }
    parameters = [_parameter(each, "path") for each in one.path_parameters]
    parameters += [_parameter(each, "query") for each in one.query]
    if parameters:
        told["parameters"] = parameters
    if body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if keys and is_open(one.method, one.path):
        told["security"] = []
    return told


def _identifier(one: Operation) -> str:
    words = re.sub(r"\W+", "_", one.path).strip("_")
    return f"{one.method.lower()}_{words}{'_slash' if one.path.endswith('/') else ''}"


def _parameter(one: Parameter, place: str) -> dict[str, Any]:
    return {"name": one.name, "in": place, "required": place == "path", "description": one.text, "schema": one.schema}


def _responses(one: Operation, schemas: dict[Any, Any], keys: bool) -> dict[str, Any]:
    content = _content(one, schemas)
    told: dict[str, Any] = {}
    if one.answer == REDIRECT:
        told["308"] = {"description": one.summary, "headers": {"Location": {"schema": {"type": "string"}}}}
    else:
        told["200"] = {"description": one.summary, "content": content}
    for status in one.also:
        told[str(status)] = {"description": "The state is another than it should be.", "content": content}
    errors = set(one.errors)
    if keys and not is_open(one.method, one.path):
        errors.add(401)
    for status in sorted(errors):
        told[str(status)] = {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": schemas[one.error]}},
        }
        if status in (429, 503):
            told[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return told


def _content(one: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not isinstance(one.answer, str):
        found["application/json"] = {"schema": schemas[one.answer]}
    elif one.answer != REDIRECT and one.event is None:
        found[one.answer] = {"schema": {"type": "string"}}
    if one.event is not None:
        # Of one event, as readers of 3.1 have it; 3.2 has a word for it, itemSchema.
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schemas[one.event]}
        event = {"type": "object", "description": _EVENTS, "properties": {"data": data}, "required": ["data"]}
        found["text/event-stream"] = {"schema": event}
    return found
