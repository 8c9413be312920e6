"""What the audit log says of each request: who asked for what, how it ended and what it took. Never a key; prompts and
answers where the operator asks for them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.observability.audit_file import AuditFile
from firsttoken.server.access import shown_path
from firsttoken.server.auth import is_open
from firsttoken.server.call import ANYBODY, CALLER, Caller, given_id

if TYPE_CHECKING:
    from firsttoken.server.call import Call, Scope

# Of the hash that tells one caller from others.
_SHOWN_TENANT = 12


class Audit:
    """Makes the records of one server, and gives them to ``file``."""

    def __init__(self, file: AuditFile, model: str) -> None:
        self.file = file
        self._model = model

    def call(self, call: Call) -> None:
        """Of a call on a hot route that is over."""
        record = self._record(call.scope, call.request_id, call.status, call.outcome, call.error)
        done = call.generations
        record |= {
            "response_id": call.response_id or None,
            "ms": round((now_ns() - call.timeline.times[0]) / NS_PER_MS, 3),
            "class": done[0].service.label if done else None,
            "answers": sum(len(one.engine_ids) for one in done),
            "prompt_tokens": sum(one.prompt_tokens for one in done),
            "output_tokens": sum(one.completion_tokens for one in done),
            "cached_tokens": sum(one.cached_tokens for one in done),
        }
        size = 0
        if call.content is not None:
            record["request"], record["answer"] = call.content.texts()
            record["cut"] = call.content.cut
            size = call.content.size
        self.file.add(record, size)

    def other(self, scope: Scope, status: int, code: str, began_ns: int) -> None:
        """Of a request on another route, or one that was turned away before it was read."""
        if is_open(scope["method"], scope["path"]):
            return  # probes, and the dashboard's files
        outcome = "finished" if status < 400 else "refused" if status < 500 else "failed"
        record = self._record(scope, given_id(scope), status, outcome, code)
        record["ms"] = round((now_ns() - began_ns) / NS_PER_MS, 3)
        self.file.add(record)

    def _record(self, scope: Scope, request_id: str | None, status: int, outcome: str, code: str) -> dict[str, Any]:
        caller = scope.get(CALLER, ANYBODY)
        assert isinstance(caller, Caller)
        client = scope.get("client")
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "remote": client[0] if client else None,
            "key": caller.name or None,
            "key_id": caller.tenant[:_SHOWN_TENANT] or None,
            "method": scope["method"],
            "route": shown_path(scope),
            "model": self._model,
            "outcome": outcome,
            "status": status or None,
            "error": code or None,
        }
