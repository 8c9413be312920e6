"""What the engine says of one request, from its state: with its first token, and at its end."""

from __future__ import annotations

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.core.request import Request
from firsttoken.transport.messages import RequestDelta, Spent


def first_delta(
    request: Request,
    tokens: list[int],
    logprobs: list[TokenLogprobs] | None,
    prompt_logprobs: PromptLogprobs | None = None,
) -> RequestDelta:
    """It brings all that is known of the way so far: the front end may end the request itself (a stop string)."""
    return RequestDelta(
        request.request_id,
        tokens,
        logprobs,
        cached_tokens=request.num_cached,
        stamps=_engine_stamps(request),
        preemptions=request.preemptions,
        cached_host=request.num_cached_host,
        cached_disk=request.num_cached_disk,
        miss=request.miss,
        spent=_spent(request),
        prompt_logprobs=prompt_logprobs,
    )


def last_delta(
    request: Request,
    tokens: list[int],
    reason: str,
    *,
    logprobs: list[TokenLogprobs] | None = None,
    error: str | None = None,
    code: str | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
    pooled: bytes | None = None,
) -> RequestDelta:
    return RequestDelta(
        request.request_id,
        tokens,
        logprobs,
        finish_reason=reason,
        stop_reason=request.stop_reason,
        error=error,
        code=code,
        cached_tokens=request.num_cached,
        stamps=_engine_stamps(request),
        preemptions=request.preemptions,
        cached_host=request.num_cached_host,
        cached_disk=request.num_cached_disk,
        miss=request.miss,
        spent=_spent(request),
        kept=request.kept,
        kept_reason=request.kept_reason,
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
    )


def too_late(request: Request) -> str:
    waited = (request.timeline.times[-1] - request.timeline.times[request.num_front_stamps]) / NS_PER_MS
    return (
        f"deadline exceeded: the request had not started when its time was up, after {waited:.0f} ms of waiting in the "
        "engine; give it more time or a better service class"
    )


def _engine_stamps(request: Request) -> list[tuple[int, int]]:
    """The engine's own part of the timeline."""
    return request.timeline.stamps()[request.num_front_stamps :]


def _spent(request: Request) -> Spent:
    # A step samples one token of a request. The one that samples the first is prefill, even if it computes one token.
    decoded = request.num_output - max(request.prefill_samples, 1)
    return Spent(list(request.queue_ns), max(request.prefill_steps, 1), max(decoded, 0))
