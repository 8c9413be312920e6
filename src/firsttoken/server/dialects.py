"""How errors are told: in the shape that the callers of a path expect."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from firsttoken.server.errors import ApiError, Headers


class Dialect(Protocol):
    """One API's way to tell errors. ``request_id`` is None for a call that has none."""

    def headers(self, request_id: str) -> Headers:
        """Those that name the request, in every answer."""

    def error_body(self, error: ApiError, request_id: str | None) -> bytes:
        """The JSON of an answer other than success."""

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        """What ends a stream that has begun."""


class OpenAIDialect:
    """``{"error": {"message", "type", "param", "code"}}``, as nearly all routes have it."""

    def headers(self, request_id: str) -> Headers:
        return [(b"x-request-id", request_id.encode())]

    def error_body(self, error: ApiError, request_id: str | None) -> bytes:
        return error.body()

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return b"data: " + self.error_body(error, request_id) + b"\n\n"


class AnthropicDialect:
    """``{"type": "error", "error": {"type", "message"}, "request_id"}``, with Anthropic's words for statuses."""

    def headers(self, request_id: str) -> Headers:
        return [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]

    def error_body(self, error: ApiError, request_id: str | None) -> bytes:
        kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.shown_message
        if error.param is not None and re.split(r"\W", error.param, maxsplit=1)[0] not in message:
            message = f"{error.shown_param}: {message}"  # it has no place of its own here
        told = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        return msgspec.json.encode(told)

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return b"event: error\ndata: " + self.error_body(error, request_id) + b"\n\n"


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
OPENAI = OpenAIDialect()
ANTHROPIC = AnthropicDialect()
_MESSAGES = "/v1/messages"


def dialect_of(path: str) -> Dialect:
    """By the path alone, so that it is known also of calls that are refused before they reach a route."""
    return ANTHROPIC if path == _MESSAGES or path.startswith(_MESSAGES + "/") else OPENAI
