"""The live feed of a server, over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any

from firsttoken.cli.opener import moved, opener, printable, running_or_tls, untrusted
from firsttoken.core.address import is_without_tls, without_tls
from firsttoken.core.errors import ConfigError, FirstTokenError
from firsttoken.diagnose.endpoint import Endpoint

# A feed is silent for one interval; longer than this past it, and it is lost.
_SILENCE_S = 10.0
_MAX_ERROR_BYTES = 1 << 16
# Far above any frame. A longer line comes in pieces, and a piece is no frame.
_MAX_LINE_BYTES = 16 << 20
# What a picture cannot be made without.
_NEEDED = frozenset(
    [
        "now_ms",
        "unix_ms",
        "state",
        "error",
        "running",
        "waiting",
        "kv_blocks",
        "classes",
        "outcomes",
        "rates",
        "steps",
        "requests",
    ]
)


class NoFeed(FirstTokenError):
    """The server answers, and there is nothing to see: trying again would not help."""


class FeedLost(FirstTokenError):
    """There is no connection, or no longer."""


class LiveFeed:
    """``/dashboard/live`` of the server at ``url``, ``hz`` frames a second. Raises `ConfigError` for what is no
    address or no key. With https the certificates of ``ca_file`` are trusted alone, with None the system's."""

    def __init__(self, url: str, api_key: str | None, *, hz: float, ca_file: str | None = None) -> None:
        self.base = str(Endpoint.parse(url.rstrip("/").removesuffix("/dashboard")))
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise ConfigError("--api-key holds signs that no HTTP header may have, or nothing")
        self._url = f"{self.base}/dashboard/live?hz={hz:g}"
        self._headers = {"Accept": "text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = _SILENCE_S + 1 / hz
        self._opener = opener(ca_file)

    def frames(self) -> Generator[dict[str, Any], None, None]:
        """Frames as they come, until the server ends the stream. Raises `NoFeed` and `FeedLost`."""
        with self._open() as reply:
            try:
                while line := reply.readline(_MAX_LINE_BYTES):
                    if line.startswith(b"data: "):
                        frame = printable(json.loads(line[6:]))
                        if not (isinstance(frame, dict) and frame.keys() >= _NEEDED):
                            raise self.other_kind()
                        yield frame
            except (ValueError, RecursionError):
                raise FeedLost(f"{self.base} sent what is no frame") from None
            except (OSError, http.client.HTTPException) as error:
                raise FeedLost(f"the connection to {self.base} broke: {_told(error)}") from None

    def other_kind(self) -> NoFeed:
        """For frames of which no picture can be made."""
        return NoFeed(f"{self.base} has a live feed of another kind: is it of another version?")

    def _open(self) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._url, headers=self._headers)  # noqa: S310  # an Endpoint is http or https
        try:
            reply: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            if is_without_tls(getattr(error, "reason", error)):
                raise NoFeed(f"cannot reach {self.base}: {without_tls(self.base)}") from None
            if advice := untrusted(getattr(error, "reason", error)):
                raise NoFeed(f"cannot reach {self.base}: {_told(error)}{advice}") from None
            asked = running_or_tls(self.base, getattr(error, "reason", error))
            raise FeedLost(f"cannot reach {self.base}: {_told(error)}; {asked}") from None
        if not reply.headers.get("Content-Type", "").startswith("text/event-stream"):
            reply.close()
            raise NoFeed(f"{self.base} answers, but with no live feed: is it firsttoken's server?")
        return reply

    def _refused(self, error: urllib.error.HTTPError) -> FirstTokenError:
        if error.code in (401, 403):
            return NoFeed(f"{self.base} asks for a key: give the right one with --api-key")
        if error.code in (404, 405, 501):
            return NoFeed(f"{self.base} answers, but has no live feed: it is not firsttoken's server, or an older one")
        if (elsewhere := moved(self.base, error)) is not None:
            return NoFeed(elsewhere)
        return FeedLost(f"{self.base} answered with {error.code}: {_message(error)}")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(printable(json.loads(error.read(_MAX_ERROR_BYTES))["error"]["message"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return str(printable(error.reason))


def _told(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    words = getattr(reason, "verify_message", None) or getattr(reason, "strerror", None)
    return str(words or reason or type(error).__name__)
