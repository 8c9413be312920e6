"""The ``response`` object: what was asked for, as it was understood, and how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firsttoken.server.errors import ApiError
from firsttoken.server.responses.request import shown_format, shown_tool
from firsttoken.server.responses.schema import ResponsesRequest

if TYPE_CHECKING:
    from firsttoken.server.conversation import Conversation

_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@dataclass(frozen=True, slots=True)
class Head:
    """What does not change while a response is made. ``kept``: it can be asked for again."""

    id: str
    created: int
    model: str
    tier: str
    kept: bool


def described(request: ResponsesRequest, conversation: Conversation, head: Head) -> dict[str, Any]:
    """The object at its beginning: nothing is said yet."""
    params = conversation.params
    reasoning = request.reasoning
    choice = request.tool_choice
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": params.max_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": head.tier,
        "store": head.kept,
        "temperature": params.temperature,
        "text": {"format": shown_format(request), "verbosity": "medium"},
        "tool_choice": _choice(choice),
        "tools": [shown_tool(tool) for tool in request.tools or ()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return {"type": "function", "name": choice.name}


def ended(
    described: dict[str, Any],
    output: list[Any],
    finish_reason: str,
    usage: dict[str, Any],
    timings: dict[str, Any] | None,
) -> dict[str, Any]:
    """The object once the answer has ended."""
    cut = finish_reason == "length"
    body = {
        **described,
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage,
    }
    if timings is not None:
        body["timings"] = timings
    return body


def failed(described: dict[str, Any], output: list[Any], error: ApiError) -> dict[str, Any]:
    """The object where the answer could not be completed."""
    told = {"code": _CODES.get(error.status, "server_error"), "message": error.shown_message}
    return {**described, "status": "failed", "error": told, "output": output}


def usage_of(conversation: Conversation) -> dict[str, Any]:
    """The tokens that were used; that a prompt is written to the cache costs nothing."""
    done = conversation.generation
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": conversation.reasoning_tokens or 0},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }
