"""What callers are told of requests that the engine did not take, or could not finish."""

from __future__ import annotations

from firsttoken.core.errors import ConstraintFailed, DeadlineExceeded, FirstTokenError, InvalidRequest, Overloaded
from firsttoken.transport.messages import Refused, RequestDelta


class GenerationFailed(FirstTokenError):
    """The engine could not go on with this one request; HTTP answers 500. The engine lives."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def failure(last: RequestDelta, prefix: str = "") -> FirstTokenError:
    """What a caller is told of a request that the engine ended with an error."""
    message = prefix + (last.error or "the engine gave no reason")
    if last.code == DeadlineExceeded.code:
        return DeadlineExceeded(message)
    if last.code == ConstraintFailed.code:
        return ConstraintFailed(message)
    return GenerationFailed(message)


def refused(refusal: Refused, prefix: str = "") -> FirstTokenError:
    """What a caller is told of a request that the engine did not take."""
    message = prefix + refusal.message
    if refusal.retry_after_s is not None:
        return Overloaded(message, refusal.retry_after_s)
    if refusal.code == DeadlineExceeded.code:
        return DeadlineExceeded(message)
    return InvalidRequest(message, param=refusal.param, code=refusal.code)
