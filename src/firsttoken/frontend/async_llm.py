"""The asynchronous front end of one engine: `AsyncLLM`, which the HTTP server and asyncio programs use."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property
from typing import Any

from firsttoken.core.cache_hint import CacheHint, retention_of
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import EngineDead, EngineDraining
from firsttoken.core.outputs import RequestOutput
from firsttoken.core.pooling import PoolingKind
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import DEFAULT_TERMS, Terms, class_named, deadline_after
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.admission import token_ids
from firsttoken.frontend.async_engine import AsyncEngine
from firsttoken.frontend.async_pooling import AsyncPoolingCalls
from firsttoken.frontend.bad_words import spelt
from firsttoken.frontend.ended import Door, counting_errors, ended_request
from firsttoken.frontend.gaps import GapSources
from firsttoken.frontend.generation import Generation
from firsttoken.frontend.named import NamedGenerations
from firsttoken.frontend.outputs import Accumulator, default_params
from firsttoken.frontend.prompts import Prompt, cut_as_asked, split_prompt
from firsttoken.text.pool import RenderedPrompt

__all__ = ["AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"]


class AsyncLLM(AsyncEngine, AsyncPoolingCalls):
    """One engine, many concurrent callers. All methods belong to the event loop that started it. How it is made and
    ended: `AsyncEngine`."""

    @cached_property
    def _named(self) -> NamedGenerations:
        """What `generate` runs."""
        return NamedGenerations()

    # --------------------------------------------------------------------- text

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        batch: int = 1,
        cache_salt: str = "",
        cut: bool = False,
    ) -> array[int]:
        """Token ids of ``text``, made in a thread unless ``batch`` such texts, asked for at once, are a matter of
        microseconds; what was tokenised for the same ``cache_salt`` lately is not again. Without ``parse_special`` what
        looks like a control token stays text. Raises `InvalidRequest`, before any work for what is too long and not to
        be ``cut``."""
        if self._admission is None:
            await self.start()
        special, parse = add_special_tokens, parse_special
        made = self._texts().encode(
            text, add_special_tokens=special, parse_special=parse, batch=batch, salt=cache_salt, cut=cut
        )
        return (await made).ids

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
        **template_kwargs: Any,
    ) -> RenderedPrompt:
        """The prompt of a chat by the checkpoint's template, and its token ids, made in a thread unless they are a
        matter of microseconds; what was tokenised for the same ``cache_salt`` lately is not again. With
        ``continue_final_message`` the answer goes on with the last message, the assistant's. ``template_kwargs`` are
        variables for the template. Raises `InvalidRequest`, also when the model has no chat template."""
        if self._admission is None:
            await self.start()
        return await self._texts().render_and_encode(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            salt=cache_salt,
        )

    # ----------------------------------------------------------------- requests

    def open(
        self,
        prompt: array[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeline: Timeline | None = None,
        terms: Terms = DEFAULT_TERMS,
        shown: frozenset[int] = frozenset(),
        pooling: PoolingKind | None = None,
        goes_on: bool = False,
    ) -> Generation:
        """Send a request to the engine; its ``n`` answers go in one message and may start in the same step.

        ``prompt`` is uint32 token ids, ``timeline`` what was stamped on the way here, ``shown`` control tokens that are
        told as text in any case. With ``pooling`` the answer is a vector; ``params.max_tokens`` must be 0. What
        ``goes_on`` with a call that has begun is taken while draining, too. The caller must read the `Generation` to
        its end or `cancel` it. Raises `InvalidRequest`, `EngineDraining`, `EngineDead`.
        """
        link = self._engine.living()
        assert self._admission is not None
        if self.is_draining and not goes_on:
            raise EngineDraining("the server is shutting down and takes no new requests: try another one")
        timeline = Timeline() if timeline is None else timeline
        if not timeline.times:
            timeline.stamp(Mark.TOKENIZED)
        requests = self._admission.admit(prompt, params, timeline=timeline, terms=terms, pooling=pooling)
        generation = Generation(
            link,
            requests,
            params,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            request_id=request_id,
            timeline=timeline,
            sources=GapSources(self.steps, self.recent, link),
            shown=shown,
        )
        self._engine.submitted()
        try:
            link.submit(requests, generation)
        except EngineDead as error:
            generation.die(error)
            raise
        return generation

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        service_class: str = "p2",
        deadline_ms: float | None = None,
        cache_hint: CacheHint | Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's: a stream of cumulative outputs, the last with ``finished``. Closing the generator (leaving the
        loop over it, cancelling its task) aborts the request. Raises what `open` and a `Generation` raise.

        Of two waiting requests the one of the better ``service_class`` ("p0", "p1", "p2") goes first, then the one
        with the lower ``priority``. One that has not started ``deadline_ms`` after the call never does, and raises
        `DeadlineExceeded`. ``cache_hint``: how long its KV should stay, see `core.cache_hint.CacheHint`.
        """
        timeline = Timeline()
        timeline.stamp(Mark.RECEIVED)
        with counting_errors(self.metrics):
            service = class_named(service_class)
            deadline_ns = 0 if deadline_ms is None else deadline_after(timeline.times[0], deadline_ms)
            retention = retention_of(cache_hint)
            terms = Terms(service=service, priority=priority, deadline_ns=deadline_ns, retention=retention)
            await self.start()
            timeline.stamp(Mark.PARSED)
            params = await spelt(sampling_params or default_params(self.generation_config), self.tokenizer)
            text, ids = split_prompt(prompt)
            timeline.stamp(Mark.TEMPLATED)
            if ids is None and text is not None:
                ids = await self.tokenize(text, cut=params.truncate_prompt_tokens is not None)
            tokens = cut_as_asked(token_ids(ids or ()), params, self.info.max_model_len)
            timeline.stamp(Mark.TOKENIZED)
            generation = self.open(tokens, params, request_id=request_id, timeline=timeline, terms=terms)
        so_far = Accumulator(generation.id, text, tokens, params.n, self.tokenizer)
        self._named.add(generation)
        try:
            async for delta in generation:
                so_far.add(delta)
                await so_far.look_aside(generation.prompt_logprobs)
                metrics = generation.timings() if so_far.finished else None
                yield so_far.output(cached_tokens=generation.cached_tokens, metrics=metrics)
        finally:
            generation.cancel()
            self._named.remove(generation)
            outcome, error = generation.outcome, generation.error_code
            self.metrics.request_over(outcome, error)
            door = Door(id=generation.id, model=self.model_name, outcome=outcome, error=error)
            generation.when_known(lambda: self.recent.add(ended_request(door, [generation], timeline)))

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End what `generate` runs under this id (all of it, if the id is shared); unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._named.cancel(name)


AsyncLLMEngine = AsyncLLM
AsyncEngineArgs = EngineArgs
