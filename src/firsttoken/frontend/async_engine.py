"""The life of one engine as an asyncio program sees it: started, ready, drained, shut down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, EngineDead, InvalidRequest
from firsttoken.core.pooling import Pooling
from firsttoken.frontend.admission import Admission
from firsttoken.frontend.keeper import EngineKeeper, Launch
from firsttoken.frontend.loading import ModelText, load_text, start_engine
from firsttoken.frontend.restarts import RestartPolicy
from firsttoken.frontend.texts import text_pool
from firsttoken.observability.flight import FlightRecorder
from firsttoken.observability.health import Health
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.observability.prompt_cache import PromptCacheCollector
from firsttoken.observability.recent import RecentRequests
from firsttoken.observability.step_history import StepHistory
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pool import TextPool
from firsttoken.text.prompt_templates import PromptTemplate
from firsttoken.text.tokenizer import Tokenizer
from firsttoken.transport.channel import EngineHandle
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import EngineInfo, EngineStats

NO_RESTARTS = RestartPolicy()


class AsyncEngine:
    """What `AsyncLLM` is besides its calls. All methods belong to the event loop that started it.

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
    ) -> Self:
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
    ) -> Self:
        """As `launch`, but the engine starts on the first call or `start`.

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

    def _texts(self) -> TextPool:
        if self._pool is None:
            raise InvalidRequest(
                f"model {self.model_name!r} has no tokenizer: give the prompt as token ids", param="prompt"
            )
        return self._pool

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

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
