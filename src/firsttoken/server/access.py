"""One log line for each finished call: what was asked, how it ended and what it took. Never a prompt, never a key."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from firsttoken.core.clock import NS_PER_MS, now_ns

if TYPE_CHECKING:
    from firsttoken.server.call import App, Call, Receive, Scope, Send

logger = logging.getLogger(__name__)

MAX_PATH_CHARS = 200
PROBES = ("/health", "/ping")
_EVENTS = {"finished": "answered", "refused": "refused", "expired": "expired", "failed": "failed"}


def log_call(call: Call) -> None:
    """The line of a call on a hot route, once it is over."""
    status = call.ended or call.status or "stopping"  # without either the whole process is being cancelled
    outcome = call.outcome
    level = logging.DEBUG if outcome == "finished" else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"outcome": outcome}
    if call.error:
        fields["code"] = call.error
    if call.caller.name:
        fields["key"] = call.caller.name
    if call.generations:
        fields["service_class"] = call.generations[0].service.label
        fields["prompt_tokens"] = sum(one.prompt_tokens for one in call.generations)
        fields["output_tokens"] = sum(one.completion_tokens for one in call.generations)
        fields["cached_tokens"] = sum(one.cached_tokens for one in call.generations)
        firsts = [one.ttft_ns for one in call.generations if one.ttft_ns is not None]
        if firsts:
            fields["ttft_ms"] = _ms(min(firsts))
    fields["total_ms"] = _ms(now_ns() - call.timeline.times[0])
    event = _event(status) if outcome == "aborted" else _EVENTS[outcome]
    _log(level, call.scope, status, call.request_id, fields, event)


def log_refusal(scope: Scope, status: int, request_id: str | None, code: str) -> None:
    """The line of a call that was turned away before anything was read of it."""
    level = _level(status)
    if logger.isEnabledFor(level):
        _log(level, scope, status, request_id, {"outcome": "refused", "code": code})


def log_unreadable(status: int) -> None:
    """The line of bytes that are no request: they have no path to show."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(_event(status), extra={"status": status})


async def logged(
    app: App,
    scope: Scope,
    receive: Receive,
    send: Send,
    request_id: str | None,
    tell: Callable[[Scope, int, str, int], None] | None = None,
) -> None:
    """Run a call on one of the other routes, and log it; ``tell`` is given its status and when it began."""
    if scope["type"] != "http" or (tell is None and not logger.isEnabledFor(logging.INFO)):
        await app(scope, receive, send)
        return
    began = now_ns()
    status = 500

    async def watched(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app(scope, receive, watched)
    finally:
        if tell is not None:
            tell(scope, status, "", began)
        # Probes come all the time, and what they are told is in the log when it begins.
        level = logging.DEBUG if scope["path"].startswith(PROBES) else _level(status)
        if logger.isEnabledFor(level):
            _log(level, scope, status, request_id, {"total_ms": _ms(now_ns() - began)})


def _log(
    level: int, scope: Scope, status: int | str, request_id: str | None, fields: dict[str, Any], event: str = ""
) -> None:
    extra: dict[str, Any] = {"method": scope["method"], "path": shown_path(scope), "status": status}
    if request_id is not None:
        extra["request_id"] = request_id
    logger.log(level, event or _event(status), extra=extra | fields)


def _level(status: int | str) -> int:
    return logging.DEBUG if isinstance(status, int) and status < 400 else logging.INFO


def _event(status: int | str) -> str:
    if isinstance(status, str):
        return "the caller left" if status == "gone" else "ended by the stop"
    return "answered" if status < 400 else "refused" if status < 500 else "failed"


def shown_path(scope: Scope) -> str:
    """As it was sent, so without blanks that could look like another field, and without its query."""
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    path: str = raw.partition(b"?")[0].decode("latin-1")
    return path if len(path) <= MAX_PATH_CHARS else path[:MAX_PATH_CHARS] + "..."


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 1)
