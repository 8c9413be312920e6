"""The address that is served on. Apart from the server, which takes longer to import than an engine to launch."""

from __future__ import annotations

import socket

from firsttoken.core.errors import ConfigError
from firsttoken.server.config import ServerConfig

# As uvicorn's: callers that may wait to be taken.
BACKLOG = 2048
# A caller who takes nothing of what waits for him for so long loses his connection, or what is kept for those who stop
# to read would grow with every one of them. The kernel sees to it, where it can.
UNREAD_S = 75


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet: an address in use is found before a model is loaded.

    Raises `ConfigError`.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise _refusal(config, error) from None
    listener.setblocking(False)
    return listener


def listen(listener: socket.socket, config: ServerConfig) -> None:
    """Take callers from now on. Raises `ConfigError`: of two servers bound at the same time one comes late."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _refusal(config, error) from None


def _refusal(config: ServerConfig, error: OSError) -> ConfigError:
    where = f"{config.host}:{config.port}"
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}; choose another --host or --port")
