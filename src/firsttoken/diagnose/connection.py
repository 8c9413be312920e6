"""A connection, made step by step with a stamp behind each: name, TCP, TLS."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Any

from firsttoken.core.address import is_without_tls, without_tls
from firsttoken.core.clock import now_ns
from firsttoken.diagnose import tcp_info
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.errors import ProbeFailed
from firsttoken.diagnose.sample import Link, Tls


@dataclass
class Connection:
    """An open connection and the stamps of its making. Close it."""

    socket: socket.socket
    began_ns: int
    resolved_ns: int
    connected_ns: int
    secured_ns: int
    tls: Tls | None
    used: bool = False

    @property
    def session(self) -> ssl.SSLSession | None:
        """What a later connection may resume; there is none before the first answer (TLS 1.3)."""
        return self.socket.session if isinstance(self.socket, ssl.SSLSocket) else None

    def link(self) -> Link:
        return tcp_info.link(self.socket)

    def close(self) -> None:
        self.socket.close()


def connect(
    endpoint: Endpoint,
    context: ssl.SSLContext | None,
    timeout_s: float,
    session: ssl.SSLSession | None = None,
) -> Connection:
    """Open a connection. ``context`` is asked for with https only. Raises `ProbeFailed` that names the phase."""
    began = now_ns()
    addresses = _resolve(endpoint)
    resolved = now_ns()
    plain = _dial(endpoint, addresses, timeout_s)
    connected = now_ns()
    if not endpoint.secure:
        return Connection(plain, began, resolved, connected, connected, None)
    assert context is not None
    secure = _handshake(endpoint, plain, context, session)
    secured = now_ns()
    return Connection(secure, began, resolved, connected, secured, _facts(secure))


def _resolve(endpoint: Endpoint) -> list[tuple[Any, ...]]:
    try:
        return socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProbeFailed("dns", f"no address for {endpoint.host!r}: {reason}; is the name right?") from None


def _dial(endpoint: Endpoint, addresses: list[tuple[Any, ...]], timeout_s: float) -> socket.socket:
    """The first address that answers, as clients do that know no better: what the others took is part of the phase."""
    reasons = []
    for family, kind, protocol, _, address in addresses:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(address)
        except OSError as error:
            connection.close()
            reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error.strerror or error
            reasons.append(f"{address[0]} port {endpoint.port}: {reason}")
        else:
            return connection
    raise ProbeFailed("tcp", f"{'; '.join(reasons)}. Is the server running, and is the port right?")


def _handshake(
    endpoint: Endpoint, plain: socket.socket, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(plain, server_hostname=endpoint.host, session=session)
    except ssl.SSLCertVerificationError as error:
        why, hint = error.verify_message, "name its authority with --ca-file, or look away with --insecure"
    except ssl.SSLError as error:
        why, hint = error.reason or str(error), f"does port {endpoint.port} speak TLS (https), and this version of it?"
        if is_without_tls(error):
            hint = without_tls(str(endpoint))
    except TimeoutError:
        why, hint = "no answer in time", f"does port {endpoint.port} speak TLS (https)?"
    except OSError as error:
        why, hint = error.strerror or str(error), f"does port {endpoint.port} speak TLS (https)?"
    plain.close()
    raise ProbeFailed("tls", f"{endpoint.authority}: {why.lower().replace('_', ' ')}; {hint}") from None


def _facts(connection: ssl.SSLSocket) -> Tls:
    cipher = connection.cipher()
    chain = getattr(connection, "get_unverified_chain", None)  # from Python 3.13 on
    return Tls(
        version=connection.version() or "unknown",
        cipher=cipher[0] if cipher else "unknown",
        resumed=bool(connection.session_reused),
        server_bytes=tcp_info.bytes_received(connection),
        chain=len(chain()) if chain is not None else None,
    )
