"""API keys. The check stands before all routing, so that a new route is closed until it is put on the open list."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from firsttoken.core.service import KeyRule
from firsttoken.server.access import log_refusal
from firsttoken.server.call import CALLER, JSON, App, Caller, Receive, Scope, Send, given_id, header
from firsttoken.server.config import ApiKey
from firsttoken.server.dialects import dialect_of
from firsttoken.server.errors import ApiError
from firsttoken.server.quota import Quota
from firsttoken.server.salts import cache_salts

OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/health/progress", "/ping", "/dashboard", "/dashboard/"}
)
# The dashboard's files, of which nothing is anybody's; its data are behind the key.
OPEN_BELOW = "/dashboard/static/"


class ApiKeys:
    """ASGI middleware: 401 without one of the keys, on every path but the health checks and the dashboard's empty page.

    Only SHA-256 digests are kept and compared, each in constant time and all of them always. A key is a tenant of its
    own; keys of one name are one tenant, so that a key can be replaced while its holder still uses the old one.
    ``lasting``: what they cache outlives the process (`salts`). ``on_refused`` is told of each call without a key.
    """

    def __init__(
        self,
        app: App,
        keys: Sequence[ApiKey],
        *,
        lasting: bool = False,
        on_refused: Callable[[Scope, ApiError], None] = lambda *_: None,
    ) -> None:
        self._app = app
        self._on_refused = on_refused
        self._holders: list[tuple[bytes, _Holder]] = []
        named: dict[str, _Holder] = {}
        for one, salt in zip(keys, cache_salts(keys, lasting=lasting), strict=True):
            digest = one.digest
            tenant = hashlib.sha256(b"firsttoken/tenant" + digest).hexdigest()
            holder = _Holder(tenant, one.rule, salt, one.name)
            self._holders.append((digest, named.setdefault(one.name, holder) if one.name else holder))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["method"], scope["path"]):
            holder = self._match(scope)
            if holder is None:
                error = _unauthorized()
                self._on_refused(scope, error)
                await refuse(scope, send, error)
                return
            scope = {**scope, CALLER: holder.caller or await holder.wait()}
        await self._app(scope, receive, send)

    def _match(self, scope: Scope) -> _Holder | None:
        given = hashlib.sha256(_key(scope)).digest()
        found = None
        for digest, holder in self._holders:
            if hmac.compare_digest(digest, given):
                found = holder
        return found


class _Holder:
    """Who has a key; ``caller`` is None until the key's salt is known, which takes a moment after the start."""

    __slots__ = ("_name", "_quota", "_rule", "_salt", "_tenant", "caller")

    def __init__(self, tenant: str, rule: KeyRule, salt: Future[str], name: str) -> None:
        self._tenant, self._rule, self._salt, self._name = tenant, rule, salt, name
        self._quota = Quota(rule) if rule.has_quota else None
        self.caller: Caller | None = None
        if salt.done():
            self.caller = Caller(tenant, rule, salt.result(), name, self._quota)

    async def wait(self) -> Caller:
        salt = await asyncio.wrap_future(self._salt)
        self.caller = Caller(self._tenant, self._rule, salt, self._name, self._quota)
        return self.caller


def is_open(method: str, path: str) -> bool:
    """Whether the route needs no key."""
    return method in ("GET", "HEAD") and (path in OPEN_PATHS or path.startswith(OPEN_BELOW))


def _key(scope: Scope) -> bytes:
    """The key that came with a request, b"" without one."""
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = header(scope, b"x-api-key") or b""  # as Anthropic's clients send it
    return key.strip()


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "A valid API key is required: send the header 'Authorization: Bearer KEY' (or 'x-api-key: KEY').",
        code="invalid_api_key",
        headers=[(b"www-authenticate", b"Bearer")],
    )


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer with an error without reading the request."""
    id_ = given_id(scope)
    body = dialect_of(scope["path"]).error_body(error, id_)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": error.status, "headers": [JSON, length, *error.headers]})
    await send({"type": "http.response.body", "body": body})
    log_refusal(scope, error.status, id_, error.word)
