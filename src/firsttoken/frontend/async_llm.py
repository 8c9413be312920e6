"""The asynchronous front end of one engine: `AsyncLLM`, which the HTTP server and asyncio programs use."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.cache_hint import CacheHint, retention_of
from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, EngineDead, EngineDraining, InvalidRequest
from firsttoken.core.outputs import RequestOutput
from firsttoken.core.pooling import Pooling, PoolingKind
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import DEFAULT_TERMS, Terms, class_named, deadline_after
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.admission import Admission, token_ids
from firsttoken.frontend.bad_words import spelt
from firsttoken.frontend.ended import Door, counting_errors, ended_request
from firsttoken.frontend.gaps import GapSources
from firsttoken.frontend.generation import Generation
from firsttoken.frontend.keeper import EngineKeeper, Launch
from firsttoken.frontend.loading import ModelText, load_text, start_engine
from firsttoken.frontend.named import NamedGenerations
from firsttoken.frontend.outputs import Accumulator, default_params
from firsttoken.frontend.prompts import Prompt, cut_as_asked, split_prompt
from firsttoken.frontend.restarts import RestartPolicy
from firsttoken.frontend.texts import text_pool
from firsttoken.observability.flight import FlightRecorder
from firsttoken.observability.health import Health
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.observability.prompt_cache import PromptCacheCollector
from firsttoken.observability.recent import RecentRequests
from firsttoken.observability.step_history import StepHistory
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pool import RenderedPrompt, TextPool
from firsttoken.text.prompt_templates import PromptTemplate
from firsttoken.text.tokenizer import Tokenizer
from firsttoken.transport.channel import EngineHandle
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import EngineInfo, EngineStats

__all__ = ["AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"]

NO_RESTARTS = RestartPolicy()


class AsyncLLM:
    """One engine, many concurrent callers. All methods belong to the event loop that started it.

    Made by `launch` (starts an engine), by `from_engine_args` (starts it on first use, as vLLM's
    ``AsyncLLMEngine``), or around a started engine: ``AsyncLLM(handle, tokenizer=...)`` and ``await start()``.

    An engine that dies takes the running requests with it (`EngineDead`). By ``restarts`` another is started, by
    ``launch_engine`` where there is no model to start it for, and requests raise `EngineRestarting` until it is ready.
    """

    def __init__(
        self,
        handle: EngineHandle | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        generation_config: GenerationConfig | None = None,
        model_name: str | None = None,
        metrics: FrontendMetrics | None = None,
        seed: int | None = None,
        text_workers: int = 2,
        prompt_templates: Sequence[PromptTemplate] = (),
        launch_engine: Launch | None = None,
        restarts: RestartPolicy = NO_RESTARTS,
    ) -> None:
        if isinstance(handle, str | EngineArgs):
            raise TypeError(
                f"AsyncLLM is built around a started engine, not {handle!r}: use "
                "AsyncLLM.from_engine_args(EngineArgs(model=...)) or `await AsyncLLM.launch(EngineArgs(model=...))`"
            )
        self.created = int(time.time())
        self.metrics = metrics if metrics is not None else FrontendMetrics()
        self.steps = StepHistory()  # the engine's, of the last minutes
        self.flight = FlightRecorder(self.steps)
        self.recent = RecentRequests()
        self.recent.subscribe(self.metrics.requests.observe)
        self._text = ModelText(model_name or "", tokenizer, chat_template, generation_config or GenerationConfig())
        self._seed = seed
        self._text_workers = text_workers
        self._prompt_templates = prompt_templates
        self._args: EngineArgs | None = None
        self._engine = EngineKeeper(self.metrics, self.steps, self.flight, launch_engine, restarts)
        self._engine.on_ready = self._on_ready
        if handle is not None:
            self._engine.take(handle)
        self._pool: TextPool | None = None
        self._admission: Admission | None = None
        self._starting: asyncio.Task[None] | None = None
        self._named = NamedGenerations()
        self._drain_until_ns = 0
        self._closed = False

    # -------------------------------------------------------------------- start

    @classmethod
    async def launch(
        cls,
        args: EngineArgs,
        *,
        in_process: bool = False,
        handle: EngineHandle | None = None,
        tokenizer: Tokenizer | None = None,
        text_workers: int = 2,
        prompt_templates: Sequence[PromptTemplate] = (),
        restarts: RestartPolicy = NO_RESTARTS,
    ) -> AsyncLLM:
        """Start an engine in a process of its own, or on a thread of this one, and wait until it is ready. ``handle``
        is the engine of ``args`` when it has been started already; ``prompt_templates`` are beginnings of chats that
        are tokenised meanwhile and found by all callers.

        The tokenizer is built while the engine loads its weights. Raises `CheckpointError` for a model that cannot be
        read, `EngineDead` when the engine could not start, `ConfigError` for prompt templates that the model refuses.
        """
        llm = cls.from_engine_args(
            args,
            in_process=in_process,
            tokenizer=tokenizer,
            text_workers=text_workers,
            prompt_templates=prompt_templates,
            restarts=restarts,
        )
        if handle is not None:
            llm._engine.take(handle)
        try:
            await llm.start()
        except BaseException:
            await llm.shutdown()  # cancelled half-way: nobody else knows of the engine
            raise
        return llm

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        in_process: bool = False,
        tokenizer: Tokenizer | None = None,
        text_workers: int = 2,
        prompt_templates: Sequence[PromptTemplate] = (),
        restarts: RestartPolicy = NO_RESTARTS,
    ) -> AsyncLLM:
        """As `launch`, but the engine starts on the first `generate`, `encode`, `render_chat` or `start`.

        Requests that bring no seed draw theirs from a generator that starts at ``args.seed``. Raises `ConfigError` for
        restarts of an engine in this process: what a thread has left behind nobody can clear away.
        """
        if in_process and restarts.limit:
            raise ConfigError("an engine on a thread of this process cannot be started again: leave restarts out")
        llm = cls(
            tokenizer=tokenizer,
            seed=args.seed,
            text_workers=text_workers,
            prompt_templates=prompt_templates,
            launch_engine=lambda: start_engine(args, in_process),
            restarts=restarts,
        )
        llm._args = args
        llm.flight.write_for(args)
        return llm

    async def start(self) -> None:
        """Wait until the engine is ready; idempotent. Raises what `launch` raises."""
        if self._admission is not None:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            await self._engine.launched()
            if self._closed:  # shut down meanwhile, when there was no engine yet to stop
                await self._engine.stop(started=False)
                raise EngineDead("the engine was shut down while it started")
            if self._args is not None:
                self._text = await asyncio.to_thread(load_text, self._args, tokenizer=self._text.tokenizer)
            if self.tokenizer is not None:  # while the engine loads
                await asyncio.to_thread(self._make_pool, self.tokenizer)
            await self._engine.start()
        except BaseException:
            await self.shutdown()
            raise

    def _make_pool(self, tokenizer: Tokenizer) -> None:
        self._pool = text_pool(
            tokenizer,
            self.chat_template,
            workers=self._text_workers,
            prompt_templates=self._prompt_templates,
        )
        if self._pool.cache is not None:
            self.metrics.registry.register(PromptCacheCollector(self._pool.cache.stats))

    def _on_ready(self, info: EngineInfo) -> None:
        """An engine is: the first, or one that takes a dead one's place."""
        if not self._text.name:
            self._text = replace(self._text, name=info.model)
        self.metrics.set_info(info, self.model_name)
        if self._pool is not None:
            self._pool.limit_to(info.max_model_len)
        if self._admission is None:
            self._admission = Admission(
                info, self.generation_config, has_tokenizer=self.tokenizer is not None, seed=self._seed
            )
        else:
            self._admission.renew(info)

    # --------------------------------------------------------------- properties

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself. Raises `EngineRestarting`, `EngineDead` while there is none."""
        self._engine.living()
        assert self._engine.info is not None
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """The latest gauges of the engine, and its totals on top of those of the engines before it."""
        return self.metrics.stats

    @property
    def kv_report(self) -> KVReport | None:
        """The latest of the KV cache's totals, the same way; None before the first."""
        return self.metrics.kv

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one (``random:``): its prompts are token ids, its text is ""."""
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._text.chat_template

    @property
    def generation_config(self) -> GenerationConfig:
        return self._text.generation

    @property
    def pooling(self) -> Pooling:
        return self._text.pooling

    @property
    def model_name(self) -> str:
        return self._text.name

    @property
    def is_draining(self) -> bool:
        return self._drain_until_ns > 0

    @property
    def drain_left_s(self) -> float:
        """How long running requests may still take."""
        return max(self._drain_until_ns - now_ns(), 0) / NS_PER_S

    @property
    def errored(self) -> bool:
        """True while there is no engine: it has died."""
        return self.error is not None

    @property
    def error(self) -> EngineDead | None:
        """Why there is none, an `EngineRestarting` if another is being started."""
        return None if self._admission is None else self._engine.error

    @property
    def is_running(self) -> bool:
        return self._admission is not None and not self.errored

    def progress(self) -> Health:
        """Whether the engine is idle, busy, stuck, dead or being started again, with the ages of its last signs."""
        return self._engine.progress()

    async def lost(self) -> str:
        """Waits until the engine is dead and none will take its place; returns why."""
        await self._engine.lost.wait()
        return str(self.error)

    # --------------------------------------------------------------------- text

    async def encode(
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

    def _texts(self) -> TextPool:
        if self._pool is None:
            raise InvalidRequest(
                f"model {self.model_name!r} has no tokenizer: give the prompt as token ids", param="prompt"
            )
        return self._pool

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
    ) -> Generation:
        """Send a request to the engine; its ``n`` answers go in one message and may start in the same step.

        ``prompt`` is uint32 token ids, ``timeline`` what was stamped on the way here, ``shown`` control tokens that are
        told as text in any case. With ``pooling`` the answer is a vector; ``params.max_tokens`` must be 0. The caller
        must read the `Generation` to its end or `cancel` it. Raises `InvalidRequest`, `EngineDraining`, `EngineDead`.
        """
        link = self._engine.living()
        assert self._admission is not None
        if self.is_draining:
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
                ids = await self.encode(text, cut=params.truncate_prompt_tokens is not None)
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

    # ---------------------------------------------------------------------- end

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests from now on and wait for the running ones; True when none is left."""
        self._drain_until_ns = now_ns() + int(timeout_s * NS_PER_S)
        self._engine.stay_away()
        link = self._engine.link
        if link is None:
            return True
        self.flight.event("draining", f"{link.live} requests run")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.idle.wait(), timeout_s)
        return link.live == 0

    async def shutdown(self) -> None:
        """Stop the engine; whatever still runs raises `EngineDead`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        self._engine.stay_away()
        link = self._engine.link
        if link is not None:
            link.fail("it was shut down", asked=True)
        await self._end_start()
        if link is not None:
            await self._engine.stop(started=self._admission is not None)
            await asyncio.to_thread(self.flight.close)

    async def _end_start(self) -> None:
        """A start under way ends, with what its link was told or, when it has no engine yet, as cancelled."""
        if self._starting is None or self._starting is asyncio.current_task():
            return
        if self._engine.link is None:
            self._starting.cancel()
        await asyncio.wait([self._starting])
        if not self._starting.cancelled():
            self._starting.exception()  # else asyncio logs it when whoever waited was cancelled

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


AsyncLLMEngine = AsyncLLM
AsyncEngineArgs = EngineArgs
