"""The errors that cross room borders. Every message says what was wrong, with the value, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from firsttoken.core.outcome import Outcome


class FirstTokenError(Exception):
    """Base of every error that firsttoken raises on purpose.

    ``outcome``: how a request ends that it ends, in all counts and records. ``code`` is a stable word for programs.
    """

    outcome: ClassVar[Outcome] = "failed"
    code: str | None = "generation_failed"

    @property
    def word(self) -> str:
        """The ``code``, or where it has none what kind of error it is: one of few, for counts and records."""
        return self.code or "invalid_request_error"


class InvalidRequest(FirstTokenError, ValueError):
    """The caller asked for something wrong or unsupported; HTTP answers 400.

    ``param`` names the field at fault (as the caller spells it), ``code`` is a stable word for programs.
    """

    outcome = "refused"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class CheckpointError(FirstTokenError):
    """A model file is missing, damaged or not understood. ``file`` and ``field`` say where."""

    def __init__(self, message: str, *, file: str | None = None, field: str | None = None) -> None:
        # A damaged file can name a field anything.
        place = ": ".join(part for part in (file, field and f"{field:.200}") if part)
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.file = file
        self.field = field


@contextmanager
def naming_file(file: str) -> Iterator[None]:
    """A `CheckpointError` from inside that does not say which file it means says ``file``."""
    try:
        yield
    except CheckpointError as error:
        if error.file is not None:
            raise
        raise CheckpointError(error.message, file=file, field=error.field) from error


class ConfigError(FirstTokenError, ValueError):
    """An option has a value that cannot be honoured; the command line exits with 2."""


class EngineDead(FirstTokenError):
    """The engine stopped, and the request ended with it. ``retry_after_s``: in so many seconds (1 or more) another one
    should be there; None where none will come."""

    code = "engine_dead"

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRestarting(EngineDead):
    """There is no engine just now, and one is being started; HTTP answers 503 with Retry-After."""

    code = "engine_restarting"


class EngineDraining(FirstTokenError):
    """The server is shutting down and takes no new requests; HTTP answers 503 with Retry-After."""

    outcome = "refused"
    code = "server_draining"


class Overloaded(FirstTokenError):
    """The engine turned a request away because it could not be served in time; HTTP answers 429 with Retry-After.

    ``retry_after_s``: in so many seconds (1 or more) it would be let in, should nobody else come.
    """

    outcome = "refused"
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class DeadlineExceeded(FirstTokenError):
    """A request did not start within the time that its caller gave it, and never will; HTTP answers 504.

    ``code`` is the word for it between processes, too.
    """

    outcome = "expired"
    code: str = "deadline_exceeded"


class ReaderTooSlow(FirstTokenError):
    """More waits for a caller than is kept for one: he takes too little of what he is sent, or nothing."""

    outcome = "aborted"
    code = "reader_too_slow"


class ConstraintFailed(FirstTokenError):
    """What limits an answer's tokens (a grammar, or what its request allows and forbids) lets it not go on; the answer
    ends with this error, and no other does. HTTP answers 400: it is the request that asks for what cannot be.

    ``code`` is the word for it between processes, too.
    """

    outcome = "failed"
    code: str = "no_token_possible"
