"""Which server is asked, as its URL says."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from firsttoken.core.address import how_to_write
from firsttoken.core.errors import ConfigError

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    """``base`` is the path before ``/v1``, without a slash at its end."""

    scheme: str
    host: str
    port: int
    base: str

    @property
    def secure(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """The value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """From ``https://host:port``, with or without ``/v1`` at its end. Raises `ConfigError`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r:.200} is not a server's address: {error}") from None
        if parts.scheme not in _PORTS or not parts.hostname or not url.isascii() or any(sign <= " " for sign in url):
            hint = how_to_write(url, "https://api.example.com/v1")
            raise ConfigError(f"{url!r:.200} is not a server's address: {hint}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"{url!r:.200} holds more than an address: a key is given with --api-key, no query")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], base)
