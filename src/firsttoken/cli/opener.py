"""HTTP to the server that was named and to no other: a key is not for whom that server sends its callers on to."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

_REDIRECTS = frozenset([301, 302, 303, 307, 308])
# A terminal takes them for commands.
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "?")


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


# Its `open` raises `HTTPError` for a redirect as for any other answer without success.
OPENER = urllib.request.build_opener(_Stays)


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
