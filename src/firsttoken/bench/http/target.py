"""Which server is meant: the parts of its URL."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from firsttoken.core.address import how_to_write
from firsttoken.core.errors import ConfigError
from firsttoken.core.tls import client_context


@dataclass(frozen=True)
class Target:
    """``base`` is the path that all routes lie below, ``/v1`` by default. ``ca_file``: whose certificates are trusted
    alone, None for the system's."""

    host: str
    port: int
    base: str
    tls: bool
    verify: bool = True
    ca_file: str | None = None

    @classmethod
    def parse(cls, url: str, *, verify: bool = True, ca_file: str | None = None) -> Target:
        """From ``http(s)://HOST[:PORT][/v1]``. Raises `ConfigError`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r:.200} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r:.200} is not a server's URL: {how_to_write(url, 'http://127.0.0.1:8000')}")
        for name, value in (("a query", parts.query), ("a fragment", parts.fragment), ("a user", parts.username)):
            if value:
                raise ConfigError(f"{url!r:.200} has {name}, which no server's URL needs here: leave it out")
        if not parts.hostname.isascii():
            raise ConfigError(f"{url!r:.200} has a host in other letters than ASCII: write it as in xn--...")
        base = parts.path.rstrip("/")
        for route in ("/chat/completions", "/completions", "/models"):
            base = base.removesuffix(route)
        if not base.isascii() or any(character <= " " for character in base):
            raise ConfigError(f"{url!r:.200} has a path that must be percent-encoded")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), base or "/v1", tls, verify, ca_file)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Raises `ConfigError` for a ``ca_file`` that holds no certificates."""
        return client_context(self.ca_file, verify=self.verify) if self.tls else None

    def head(self, method: str, route: str, api_key: str | None) -> bytes:
        """A request's head up to what depends on its body. Raises `ConfigError` for a key that no header can hold."""
        lines = [f"{method} {self.base}{route} HTTP/1.1", f"host: {self.authority}", "user-agent: firsttoken-bench"]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("the API key holds characters that no HTTP header can: is it the right one?")
            lines.append(f"authorization: Bearer {api_key}")
        if method == "POST":
            lines += ["content-type: application/json", "accept: text/event-stream"]
        return "\r\n".join(lines).encode("ascii") + b"\r\n"


def request(head: bytes, body: bytes = b"") -> bytes:
    """The bytes to send."""
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body) if body else head + b"\r\n"
