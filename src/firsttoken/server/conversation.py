"""A chat in no API's words: what a route asks for, and the pieces of the answers. Chat completions and the routes like
it decode their own requests into an `Ask`, and write the pieces in their own shapes."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Terms
from firsttoken.core.timeline import Mark
from firsttoken.server.call import Call
from firsttoken.server.state import AppState
from firsttoken.server.streaming import deltas, named
from firsttoken.text.pieces import Content, Piece

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta, Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be answered. ``messages`` are as `text.messages` takes them; ``param`` is what errors call them."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    terms: Terms
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    param: str = "messages"


class Said(msgspec.Struct):
    """What is new in an answer: its pieces, and the tokens that they were made of, which need not be as many.

    ``finish_reason`` is there with the answer's last: "stop", "length", or "tool_calls" where it called tools.
    """

    delta: Delta
    pieces: Sequence[Piece]
    finish_reason: str | None


@dataclass(slots=True)
class Conversation:
    """A chat that is being answered. Whoever opened it reads `said` to its end, or calls `cancel`."""

    ask: Ask
    prompt: array[int]
    generation: Generation

    @property
    def params(self) -> SamplingParams:
        return self.ask.params

    async def said(self) -> AsyncIterator[Said]:
        """The answers as they come, those of ``params.n`` side by side. Raises what `streaming.deltas` raises."""
        async for delta in deltas(self.generation, prompt_field=self.ask.param):
            yield Said(delta, (Content(delta.text),) if delta.text else (), delta.finish_reason)

    def cancel(self) -> None:
        self.generation.cancel()  # does nothing after the end


async def open_conversation(state: AppState, call: Call, ask: Ask) -> Conversation:
    """Render, tokenise and send it to the engine. Raises `ApiError` and `InvalidRequest` that name ``ask.param``, and
    what `AsyncLLM.open` raises."""
    llm = state.llm
    call.timeline.stamp(Mark.PARSED)
    rendered = await llm.render_chat(
        ask.messages,
        add_generation_prompt=ask.add_generation_prompt,
        cache_salt=ask.terms.salt,
        **ask.template_kwargs,
    )
    call.timeline.stamp(Mark.TEMPLATED, rendered.templated_ns)
    call.timeline.stamp(Mark.TOKENIZED, rendered.tokenized_ns)
    try:
        generation = llm.open(
            rendered.ids, ask.params, request_id=call.request_id, timeline=call.timeline, terms=ask.terms
        )
    except InvalidRequest as error:
        raise named(error, ask.param) from None
    call.generations.append(generation)
    return Conversation(ask, rendered.ids, generation)
