"""A chat in no API's words: what a route asks for, and the pieces of the answers. Chat completions and the routes like
it decode their own requests into an `Ask`, and write the pieces in their own shapes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Terms
from firsttoken.core.timeline import Mark
from firsttoken.frontend.bad_words import spelt
from firsttoken.frontend.consumer import Rest
from firsttoken.frontend.flow import Tell, flow
from firsttoken.frontend.prompts import cut_as_asked
from firsttoken.server.call import Call
from firsttoken.server.constraint import constrain
from firsttoken.server.cost import allow
from firsttoken.server.errors import bad_request
from firsttoken.server.readers import AnswerReaders
from firsttoken.server.state import AppState
from firsttoken.server.streaming import check_whole, named, source
from firsttoken.server.tools import ToolUse
from firsttoken.text.messages import content_text
from firsttoken.text.pieces import Content, Piece, Reasoning

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta, Generation
    from firsttoken.text.pool import RenderedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be answered. ``messages`` are as `text.messages` takes them; ``param`` is what errors call them."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    terms: Terms
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answers go on with the last message, the assistant's."""
    echo: str = ""
    """What they are told to begin with."""
    tools: ToolUse | None = None
    reasoning: bool = True
    """Reasoning is told; else it is left out of the pieces."""
    param: str = "messages"
    grammar_field: str | None = None
    """What errors call that which ``params.grammar`` was made of."""


class Said(msgspec.Struct, gc=False):
    """What is new in an answer: its pieces, and the tokens that they were made of, which need not be as many.

    ``finish_reason`` is there with the answer's last: "stop", "length", or "tool_calls" where it called tools.
    """

    delta: Delta
    pieces: Sequence[Piece]
    finish_reason: str | None


class Events(Protocol):
    """Encodes answers that have begun and do not end yet, in the shapes of one API."""

    @property
    def text(self) -> Callable[[int, str], bytes | None] | None:
        """What `middle` gives for an answer's index and nothing but more of its text; None where more than text is
        told of each piece."""

    def middle(self, said: Said) -> bytes | None:
        """What is said; None where it begins or ends an answer."""


@dataclass(slots=True)
class Conversation:
    """A chat that is being answered. Whoever opened it reads `said` to its end, or calls `cancel`."""

    ask: Ask
    prompt: array[int]
    generation: Generation
    readers: AnswerReaders | None = None
    """None where an answer is content and nothing else."""

    @property
    def params(self) -> SamplingParams:
        return self.ask.params

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all answers so far; None for a model that does not reason."""
        return None if self.readers is None else self.readers.reasoning_tokens

    async def read(self, take: Callable[[Said], None]) -> None:
        """Give what is said to ``take`` as it comes, the answers of ``params.n`` side by side. Raises `ApiError` for an
        answer that the server ended, and what `frontend.flow` raises."""
        await self._flow(self._telling(take))

    async def write(self, call: Call, events: Events, edge: Callable[[Said], Coroutine[Any, Any, None]]) -> None:
        """The same to the caller, as ``events`` encode it; ``edge`` is to write what they do not. Raises what `read`
        raises."""
        put, text = call.put, events.text

        def tell(said: Said) -> Rest:
            encoded = events.middle(said)
            if encoded is None:
                return edge(said)
            return put(encoded) if encoded else None

        general = self._telling(tell)
        if text is None or self.readers is not None or self.ask.echo:
            await self._flow(general)
            return

        def tell_text(delta: Delta) -> Rest:
            if delta.finish_reason is None:
                encoded = text(delta.index, delta.text)
                if encoded is not None:
                    return put(encoded) if encoded else None
            return general(delta)

        await self._flow(tell_text)

    async def _flow(self, tell: Tell) -> None:
        # What holds them was made of the tools, where nothing else was asked for.
        held = self.ask.grammar_field or ("tools" if self.ask.tools is not None else None)
        await flow(source(self.generation, tell, prompt_field=self.ask.param, grammar_field=held))

    def _telling(self, tell: Callable[[Said], Rest]) -> Tell:
        echo = dict.fromkeys(range(self.params.n), self.ask.echo) if self.ask.echo else {}

        def told(delta: Delta) -> Rest:
            if delta.finish_reason is not None:
                check_whole(delta)
            said = self._read(delta)
            if echo and (text := echo.pop(delta.index, "")):
                said.pieces = (Content(text), *said.pieces)
            return tell(said)

        return told

    def _read(self, delta: Delta) -> Said:
        if self.readers is None:
            return Said(delta, (Content(delta.text),) if delta.text else (), delta.finish_reason)
        pieces, finish_reason = self.readers.read(delta)
        if finish_reason is not None and delta.finish_reason is None:
            self.generation.end(delta.index)
        if not self.ask.reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return Said(delta, pieces, finish_reason)

    def cancel(self) -> None:
        self.generation.cancel()  # does nothing after the end


async def render(state: AppState, ask: Ask) -> RenderedPrompt:
    """The prompt and its tokens. Raises `ApiError` and `InvalidRequest` that name ``ask.param``."""
    tools, formats = ask.tools, state.formats
    if tools is not None and formats.tools is None:
        raise bad_request(f"tools cannot be used: {formats.why_no_tools}", "tools", "unsupported_parameter")
    rendered = await state.llm.render_chat(
        ask.messages,
        add_generation_prompt=ask.add_generation_prompt,
        continue_final_message=ask.continue_final_message,
        tools=None if tools is None else tools.definitions(),
        cache_salt=ask.terms.salt,
        **ask.template_kwargs,
    )
    ids = cut_as_asked(rendered.ids, ask.params, state.llm.info.max_model_len)
    return rendered if ids is rendered.ids else replace(rendered, ids=ids)


async def open_conversation(state: AppState, call: Call, ask: Ask) -> Conversation:
    """Render, tokenise and send it to the engine. Raises `ApiError` and `InvalidRequest` that name ``ask.param``, and
    what `AsyncLLM.open` raises."""
    llm, formats, tools = state.llm, state.formats, ask.tools
    if ask.grammar_field is not None:
        await state.grammars.check(ask.params.grammar, ask.grammar_field)
    call.timeline.stamp(Mark.PARSED)
    rendered = await render(state, ask)
    call.timeline.stamp(Mark.TEMPLATED, rendered.templated_ns)
    call.timeline.stamp(Mark.TOKENIZED, rendered.tokenized_ns)
    so_far = content_text(ask.messages[-1]) if ask.continue_final_message else ""
    thinks = formats.thinks(rendered.text, so_far)
    # A model that was told not to think may do so all the same, but is not invited to by a grammar.
    silent = thinks == "first" and ask.template_kwargs.get("enable_thinking") is False
    held = constrain(tools, ask.params.grammar, formats, "no" if silent else thinks)
    if tools is not None and held.grammar is not None and held.grammar is not ask.params.grammar:
        await state.grammars.check_calls(held.grammar, tools.callable)
    params = ask.params if held.grammar is ask.params.grammar else ask.params.replace(grammar=held.grammar)
    prompt = rendered.ids
    if (more := held.closed + held.begun) and llm.tokenizer is not None:
        prompt = prompt + llm.tokenizer.encode(more, add_special_tokens=False)
    readers = AnswerReaders.of(
        formats, params, tools, llm.tokenizer, held.thinks if held.grammar else thinks, held.begun
    )
    allow(state, call, [prompt], params, param=ask.param)
    params = await spelt(params, llm.tokenizer)
    try:
        generation = llm.open(
            prompt,
            params,
            request_id=call.request_id,
            timeline=call.timeline,
            terms=ask.terms,
            shown=readers.shown if readers is not None else frozenset(),
        )
    except InvalidRequest as error:
        raise named(error, ask.param) from None
    call.generations.append(generation)
    return Conversation(ask, prompt, generation, readers)
