"""API keys. The check stands before all routing, so that a new route is closed until it is put on the open list."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from firsttoken.server.access import log_refusal
from firsttoken.server.call import CALLER, JSON, App, Caller, Receive, Scope, Send, given_id, header
from firsttoken.server.config import ApiKey
from firsttoken.server.errors import ApiError
from firsttoken.server.salts import cache_salts

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/progress"})


class ApiKeys:
    """ASGI middleware: 401 without one of the keys, on every path but the health checks.

    Only SHA-256 digests are kept and compared, each in constant time and all of them always. A key is a tenant of its
    own; keys of one name are one tenant, so that a key can be replaced while its holder still uses the old one.
    ``lasting``: what they cache outlives the process (`salts`).
    """

    def __init__(self, app: App, keys: Sequence[ApiKey], *, lasting: bool = False) -> None:
        self._app = app
        self._callers: list[tuple[bytes, Caller]] = []
        named: dict[str, Caller] = {}
        for one, salt in zip(keys, cache_salts(keys, lasting=lasting), strict=True):
            digest = hashlib.sha256(one.key.encode()).digest()
            tenant = hashlib.sha256(b"firsttoken/tenant" + digest).hexdigest()
            caller = Caller(tenant, one.rule, salt)
            self._callers.append((digest, named.setdefault(one.name, caller) if one.name else caller))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            caller = self._match(scope)
            if caller is None:
                await refuse(scope, send, _unauthorized())
                return
            scope = {**scope, CALLER: caller}
        await self._app(scope, receive, send)

    def _match(self, scope: Scope) -> Caller | None:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
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
