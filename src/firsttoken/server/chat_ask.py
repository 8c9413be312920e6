"""From the fields of a chat request to what is asked for: chat completions, and routes that put theirs in its words."""

from __future__ import annotations

from typing import Any

from firsttoken.server.call import Call
from firsttoken.server.chat_tools import chat_tools
from firsttoken.server.conversation import Ask
from firsttoken.server.decode import check_template_kwargs
from firsttoken.server.sampling import chat_params
from firsttoken.server.schema import ChatRequest
from firsttoken.server.service import agree
from firsttoken.server.state import AppState


def chat_ask(state: AppState, call: Call, request: ChatRequest, messages: list[dict[str, Any]]) -> tuple[Ask, str]:
    """What is asked for, and the ``service_tier`` of its answer. How it is to be written is not looked at.

    Raises `ApiError` and `InvalidRequest` that name a field of ``request``, and `EngineDraining`.
    """
    state.check_open()
    state.check_model(request.model)
    params = chat_params(request, state.llm.generation_config)
    params.check_vocabulary(state.llm.info.vocab_size)
    terms, tier = agree(request, call.caller, call.timeline.times[0])
    ask = Ask(
        messages=messages,
        params=params,
        terms=terms,
        template_kwargs=check_template_kwargs(request.chat_template_kwargs),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=chat_tools(request, state.prompt_limit),
        reasoning=request.include_reasoning is not False,
    )
    return ask, tier
