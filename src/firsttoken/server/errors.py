"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import logging

import msgspec

from firsttoken.core.errors import (
    ConstraintFailed,
    DeadlineExceeded,
    EngineDead,
    EngineDraining,
    EngineRestarting,
    FirstTokenError,
    InvalidRequest,
    Overloaded,
    ReaderTooSlow,
)
from firsttoken.core.outcome import Outcome

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
# An error quotes what the caller sent, which may be megabytes; these are far above any message of our own.
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200

Headers = list[tuple[bytes, bytes]]


class ApiError(Exception):
    """An answer other than success. ``param`` names the field at fault, ``code`` is a stable word for programs.
    ``outcome``: how the request ends, by default "refused" below 500 and "failed" from there on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.outcome: Outcome = outcome or ("refused" if status < 500 else "failed")
        self.message = message
        self.type = type_
        self.param = param
        self.code = code
        self.headers = headers or []

    @property
    def word(self) -> str:
        """Its ``code``, or where it has none its ``type``: one of few, for counts and records."""
        return self.code or self.type

    @property
    def shown_message(self) -> str:
        """The message as callers get it: always valid UTF-8 and never long, whatever it quotes."""
        return _clean(self.message, MAX_MESSAGE_CHARS)

    @property
    def shown_param(self) -> str | None:
        """The field as callers get it: valid UTF-8, and not long."""
        return None if self.param is None else _clean(self.param, MAX_PARAM_CHARS)

    def body(self) -> bytes:
        """The JSON object, as OpenAI's."""
        error = {
            "message": self.shown_message,
            "type": self.type,
            "param": self.shown_param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, outcome: Outcome = "failed", retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """A 503 that says when to come back."""
    retry = [(b"retry-after", str(retry_after_s).encode())]
    return ApiError(503, message, type_="service_unavailable", code=code, headers=retry, outcome=outcome)


def overloaded(error: Overloaded) -> ApiError:
    """A 429 that says when to come back."""
    retry = [(b"retry-after", str(error.retry_after_s).encode())]
    return ApiError(429, _sentence(error.message), type_="overloaded", code=error.code, headers=retry)


def stopping() -> ApiError:
    message = "The server is stopping; the request was ended. Send it again later."
    return unavailable(message, "server_stopping", outcome="aborted")


def as_api_error(exc: BaseException, request_id: str | None = None) -> ApiError:
    """What a caller is told about an exception. Unexpected ones are logged, and nothing of them is shown."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, InvalidRequest):
        return bad_request(exc.message, exc.param, exc.code)
    if isinstance(exc, EngineDraining):
        message = "The server is shutting down and takes no new requests."
        return unavailable(message, exc.code or "", outcome=exc.outcome)
    if isinstance(exc, EngineDead):
        return _engine_dead(exc)
    if isinstance(exc, Overloaded):
        return overloaded(exc)
    if isinstance(exc, DeadlineExceeded):
        return ApiError(504, str(exc), type_="timeout", param="deadline_ms", code=exc.code, outcome=exc.outcome)
    if isinstance(exc, ReaderTooSlow):
        return ApiError(408, _sentence(str(exc)), code=exc.code, outcome=exc.outcome)
    if isinstance(exc, ConstraintFailed):
        return ApiError(400, _sentence(str(exc)), code=exc.code, outcome=exc.outcome)
    if isinstance(exc, FirstTokenError):
        return ApiError(500, str(exc), type_="server_error", code=exc.code)
    extra = {} if request_id is None else {"request_id": request_id}
    logger.error("a request failed unexpectedly", exc_info=exc, extra=extra)
    return ApiError(500, "The server failed to handle the request; its log says why.", type_="server_error")


def _engine_dead(error: EngineDead) -> ApiError:
    what = _sentence(str(error))
    if error.retry_after_s is None:
        return unavailable(f"{what}. The server must be started again.", error.code or "")
    what += ". It is being started again" + ("" if isinstance(error, EngineRestarting) else ", without this request")
    advice = f"send the request again in {error.retry_after_s} s"
    return unavailable(f"{what}: {advice}.", error.code or "", retry_after_s=error.retry_after_s)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _clean(text: str, limit: int) -> str:
    """Valid Unicode of at most ``limit`` characters: too long a text loses its middle, for its end holds the advice."""
    if len(text) > limit:
        half = (limit - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return text.encode("utf-8", "replace").decode("utf-8")
