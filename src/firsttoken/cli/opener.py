"""HTTP to the server that was named and to no other: a key is not for whom that server sends its callers on to."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from typing import Any

from firsttoken.core.tls import client_context

_REDIRECTS = frozenset([301, 302, 303, 307, 308])
# A terminal takes them for commands.
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "?")


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def opener(ca_file: str | None) -> urllib.request.OpenerDirector:
    """Its ``open`` raises `HTTPError` for a redirect as for any other answer without success. With https it trusts the
    certificates of ``ca_file`` alone, with None the system's. Raises `ConfigError` for a file that holds none."""
    secure = urllib.request.HTTPSHandler(context=client_context(ca_file))
    return urllib.request.build_opener(_Stays, secure)


def untrusted(error: object) -> str:
    """What to do about ``error``, where it is a certificate that nobody vouches for; else nothing."""
    return "; name its authority with --ca-file" if isinstance(error, ssl.SSLCertVerificationError) else ""


def moved(base: str, error: urllib.error.HTTPError) -> str | None:
    """What to say where ``error`` is a redirect of the server at ``base``; None where it is something else."""
    if error.code not in _REDIRECTS:
        return None
    place = str(printable(error.headers.get("Location", "nowhere")))
    return f"{base} sends its callers on to {place:.200}: give the address of that server"


def printable(value: Any) -> Any:
    """The same JSON value, with nothing in its strings that a terminal would obey."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, list):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): printable(one) for name, one in value.items()}
    return value


def running_or_tls(url: str, reason: object) -> str:
    """What to ask of a server that gave no answer; one that hangs up on plain http may speak https alone."""
    asked = "is the server running?"
    if url.startswith("http://") and isinstance(reason, ConnectionResetError):
        return f"{asked} If it speaks https alone, say https://{url.partition('://')[2]}"
    return asked
