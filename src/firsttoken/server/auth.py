"""API keys. The check stands before all routing, so that a new route is closed until it is put on the open list."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from firsttoken.server.access import log_refusal
from firsttoken.server.call import JSON, App, Receive, Scope, Send, given_id, header
from firsttoken.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/progress"})


class ApiKeys:
    """ASGI middleware: 401 without one of the keys, on every path but the health checks.

    Only SHA-256 digests are kept and compared, each in constant time and all of them always. A key's digest also
    names the tenant, so that cached prefixes are not shared between keys.
    """

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            digest = self._match(scope)
            if digest is None:
                await refuse(scope, send, _unauthorized())
                return
            scope = {**scope, "firsttoken.tenant": hashlib.sha256(b"firsttoken/tenant" + digest).hexdigest()}
        await self._app(scope, receive, send)

    def _match(self, scope: Scope) -> bytes | None:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = digest
        return found if scheme.lower() == b"bearer" else None


def _is_open(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "A valid API key is required: send the header 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers=[(b"www-authenticate", b"Bearer")],
    )


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer with an error without reading the request."""
    body = error.body()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": error.status, "headers": [JSON, length, *error.headers]})
    await send({"type": "http.response.body", "body": body})
    log_refusal(scope, error.status, given_id(scope))
