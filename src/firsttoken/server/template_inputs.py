"""What a chat request tells the model's template beside its messages."""

from __future__ import annotations

from typing import Any

from firsttoken.server.decode import check_template_kwargs
from firsttoken.server.errors import bad_request
from firsttoken.server.schema import ChatRequest, TokenizeRequest
from firsttoken.server.state import AppState

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def template_inputs(state: AppState, request: ChatRequest) -> dict[str, Any]:
    """The variables for the template: the caller's, and how much to think where the template reads that. Raises
    `ApiError` 400 for what it does not read, and `InvalidRequest` for names that are not the caller's to set."""
    template = state.llm.chat_template
    reads = frozenset[str]() if template is None else template.reads
    given = check_template_kwargs(request.chat_template_kwargs)
    effort = request.reasoning_effort
    if effort is not None:
        name, value = _effort(effort, reads, reasons=state.formats.reasoning is not None)
        if name is not None:
            _set(given, name, value, "reasoning_effort")
    if request.enable_thinking is not None:
        if "enable_thinking" not in reads:
            raise bad_request(
                "enable_thinking is not supported: this model's chat template does not read it; leave it out",
                "enable_thinking",
                "unsupported_parameter",
            )
        _set(given, "enable_thinking", request.enable_thinking, "enable_thinking")
    return given


def adds_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether what begins the assistant's message stands at the end of the prompt. Raises `ApiError` 400 where the last
    message shall go on and a new one begin."""
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message goes on with the last message, and add_generation_prompt begins another: send one",
            "continue_final_message",
        )
    return request.add_generation_prompt is not False and not request.continue_final_message


def _effort(effort: str, reads: frozenset[str], *, reasons: bool) -> tuple[str | None, Any]:
    """The variable that says so, None where nothing need be said."""
    if effort not in EFFORTS:
        raise bad_request(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r:.80}", "reasoning_effort"
        )
    if "reasoning_effort" in reads:
        return "reasoning_effort", effort
    if effort == "none" and "enable_thinking" in reads:
        return "enable_thinking", False
    if effort == "none" and not reasons:
        return None, None
    advice = "leave it out" if reasons and "enable_thinking" not in reads else 'leave it out or send "none"'
    raise bad_request(
        f"reasoning_effort {effort!r} is not supported: this model's chat template does not read it; {advice}",
        "reasoning_effort",
        "unsupported_parameter",
    )


def _set(given: dict[str, Any], name: str, value: Any, field: str) -> None:
    if given.setdefault(name, value) != value:
        raise bad_request(
            f"{field} says {value!r} of {name}, and chat_template_kwargs.{name} {given[name]!r:.80}: send one", field
        )
