"""From the fields of a chat request to what is asked for: chat completions, and routes that put theirs in its words."""

from __future__ import annotations

from typing import Any

from firsttoken.server.call import Call
from firsttoken.server.chat_tools import chat_tools
from firsttoken.server.conversation import Ask
from firsttoken.server.errors import bad_request
from firsttoken.server.sampling import chat_params
from firsttoken.server.schema import ChatRequest
from firsttoken.server.service import agree
from firsttoken.server.state import AppState
from firsttoken.server.structured import grammar_field
from firsttoken.server.template_inputs import adds_prompt, template_inputs
from firsttoken.text.messages import content_text


def chat_ask(state: AppState, call: Call, request: ChatRequest, messages: list[dict[str, Any]]) -> tuple[Ask, str]:
    """What is asked for, and the ``service_tier`` of its answer. How it is to be written is not looked at.

    Raises `ApiError` and `InvalidRequest` that name a field of ``request``, and `EngineDraining`.
    """
    state.check_open()
    state.check_model(request.model)
    call.take_id(request.request_id)
    params = chat_params(request, state.llm.generation_config)
    params.check_vocabulary(state.llm.info.vocab_size)
    terms, tier = agree(request, call.caller, call.timeline.times[0])
    ask = Ask(
        messages=messages,
        params=params,
        terms=terms,
        template_kwargs=template_inputs(state, request),
        add_generation_prompt=adds_prompt(request),
        continue_final_message=bool(request.continue_final_message),
        echo=_echo(request, messages),
        tools=chat_tools(request, state.prompt_limit),
        reasoning=request.include_reasoning is not False,
        grammar_field=grammar_field(request),
    )
    return ask, tier


def _echo(request: ChatRequest, messages: list[dict[str, Any]]) -> str:
    """What the answers begin with, as vLLM has it: the last message's content, where it is the assistant's."""
    if not request.echo:
        return ""
    if messages[-1].get("role") != "assistant":
        raise bad_request(
            "echo repeats the last message, and only the assistant's can be: send an assistant message last, or leave "
            "echo out",
            "echo",
        )
    return content_text(messages[-1])
