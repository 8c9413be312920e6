"""What a probe raises: a sentence that says at which phase what happened."""

from __future__ import annotations

from firsttoken.core.errors import FirstTokenError


class ProbeFailed(FirstTokenError):
    """A request did not get its whole answer; the command line exits with 1. The text begins with the phase, but where
    the server's status says it all.

    ``phase`` is one of dns, tcp, tls, ttfb, first_token, gaps, transfer: what was going on when it failed. ``status``
    is the HTTP status where there was one.
    """

    def __init__(self, phase: str, message: str, *, status: int | None = None) -> None:
        refused = status is not None and status >= 400
        super().__init__(message if refused else f"{PHASE_WORDS[phase]}: {message}")
        self.phase = phase
        self.message = message
        self.status = status


PHASE_WORDS = {
    "dns": "looking up the name",
    "tcp": "connecting",
    "tls": "the TLS handshake",
    "ttfb": "waiting for the first byte",
    "first_token": "waiting for the first token",
    "gaps": "between tokens",
    "transfer": "after the last token",
}
