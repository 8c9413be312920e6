"""`LLM`: many prompts in, their outputs back, one process, no asyncio. Names and behaviour follow vLLM's class."""

from __future__ import annotations

import queue
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.cache_hint import CacheHint, retention_of
from firsttoken.core.engine_args import DEFAULT_MODEL, EngineArgs
from firsttoken.core.errors import EngineDead, InvalidRequest
from firsttoken.core.outputs import RequestOutput
from firsttoken.core.pooling import PoolingKind, PoolingParams
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Terms, class_named
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.core.vllm_options import vllm_hint
from firsttoken.frontend import vectors
from firsttoken.frontend.admission import Admission, token_ids
from firsttoken.frontend.answer import Answer
from firsttoken.frontend.bad_words import spell
from firsttoken.frontend.failures import failure, refused
from firsttoken.frontend.link import EngineLink
from firsttoken.frontend.llm_pooling import PoolingCalls
from firsttoken.frontend.loading import ModelText, load_text
from firsttoken.frontend.outputs import Accumulator, default_params
from firsttoken.frontend.pooled import Pooled, pooling_params
from firsttoken.frontend.prompts import Prompt, cut_as_asked, split_prompt, split_prompts
from firsttoken.frontend.times import RequestTimes
from firsttoken.observability.flight import FlightRecorder
from firsttoken.observability.step_history import StepHistory
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.tokenizer import Tokenizer
from firsttoken.transport.channel import EngineHandle
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import EngineInfo, EngineStats, Refused, RequestDelta

# How often a wait looks whether the engine still lives, should its channel not say so.
_CHECK_S = 0.3
_STOP_S = 5.0

Params = SamplingParams | Sequence[SamplingParams] | None
Classes = str | Sequence[str]
Priorities = int | Sequence[int] | None
Hint = CacheHint | Mapping[str, Any] | None
Hints = Hint | Sequence[Hint]
Arrival = tuple[RequestDelta, int] | Refused | EngineDead


class LLM(PoolingCalls):
    """An engine on a thread of this process::

        with LLM("smollm2") as llm:
            llm.generate(["The capital of France is"], SamplingParams(temperature=0))

    ``options`` are the fields of `EngineArgs`. Raises `TypeError` for others, `ConfigError` for a targets file that
    cannot be honoured, `CheckpointError` for a model that cannot be read, `EngineDead` when the engine could not start.
    May be used from several threads at once.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        from firsttoken.engine.launch import start_thread

        if unknown := [name for name in options if name not in EngineArgs.__struct_fields__]:
            raise TypeError(f"LLM has no option {unknown[0]!r}{vllm_hint(unknown[0])}")
        args = EngineArgs(model=model, **options)
        handle = start_thread(args)
        try:
            text = load_text(args)
        except BaseException:
            handle.client.close()  # the engine leaves when it finds out; the error need not wait for that
            raise
        self._connect(handle, text, args.seed, args)

    @classmethod
    def from_handle(
        cls,
        handle: EngineHandle,
        *,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        generation_config: GenerationConfig | None = None,
        seed: int | None = 0,
    ) -> LLM:
        """The same around an engine that was started elsewhere; it is stopped with this object."""
        llm = cls.__new__(cls)
        text = ModelText("", tokenizer, chat_template, generation_config or GenerationConfig())
        llm._connect(handle, text, seed)
        return llm

    def _connect(self, handle: EngineHandle, text: ModelText, seed: int | None, args: EngineArgs | None = None) -> None:
        self._text = text
        self._link = EngineLink(handle)
        self.steps = StepHistory()  # the engine's, of the last minutes
        self.flight = FlightRecorder(self.steps)
        if args is not None:
            self.flight.write_for(args)
        self._link.on_steps, self._link.flight = self.steps.add, self.flight
        self._stop = weakref.finalize(self, _stop, self._link)
        # On a thread of its own: within a running event loop (a notebook) the channel would deliver to that loop,
        # which the caller is about to block.
        listening = threading.Thread(target=self._link.listen, name="firsttoken-listen")
        listening.start()
        listening.join()
        try:
            self.info: EngineInfo = self._wait_ready()
            self.flight.info = self.info
        except BaseException:
            self.close()
            raise
        self._admission = Admission(self.info, text.generation, has_tokenizer=text.tokenizer is not None, seed=seed)

    def _wait_ready(self) -> EngineInfo:
        while True:
            try:
                return self._link.ready.result(_CHECK_S)
            except TimeoutError:
                self._link.check()

    # ----------------------------------------------------------------- generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        service_class: Classes = "p2",
        priority: Priorities = None,
        cache_hint: Hints = None,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order.

        ``prompts``: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of these.
        ``sampling_params``: one for all, one for each, or None for the checkpoint's defaults. All prompts are checked
        before any is started. ``use_tqdm`` shows progress on stderr. ``service_class``, "p0", "p1" or "p2": one for
        all or one for each; the best goes first, and inside a class the lowest ``priority``, as in vLLM: one for all or
        one for each too. ``cache_hint``: how long a prompt's KV should stay (`core.cache_hint.CacheHint` or a dict
        of its fields), one for all or one for each. More than may wait in the engine wait here.

        Raises `InvalidRequest`, `GenerationFailed` when a request failed in the engine, `Overloaded` when others leave
        it no room, `EngineDead`.
        """
        items = split_prompts(prompts)
        params = self._params_for(len(items), sampling_params)
        terms = _terms_for(len(items), service_class, priority, cache_hint)
        return self._run(self._jobs(items, params, terms), use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        service_class: Classes = "p2",
        priority: Priorities = None,
        cache_hint: Hints = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or several, by the checkpoint's chat template; with
        ``continue_final_message`` the last message, the assistant's, goes on. Raises as `generate`."""
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations: list[Any] = list(messages) if several else [messages]
        params = self._params_for(len(conversations), sampling_params)
        terms = _terms_for(len(conversations), service_class, priority, cache_hint)
        template, tokenizer = self._text.chat_template, self.get_tokenizer()
        if template is None:
            raise InvalidRequest(f"model {self.info.model!r} has no chat template: use generate", param="messages")
        controls = tokenizer.control_tokens(template.writes)
        jobs = []
        for number, (conversation, one, on) in enumerate(zip(conversations, params, terms, strict=True)):
            timeline = Timeline()
            timeline.stamp(Mark.PARSED)
            rendered = template.render_apart(
                list(conversation),
                controls,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            timeline.stamp(Mark.TEMPLATED)
            # The template writes its own BOS.
            if rendered.guarded is None:
                tokens = tokenizer.encode(rendered.text, add_special_tokens=False)
            else:
                tokens = controls.encode(rendered.text, controls.spans(rendered.guarded))
            jobs.append(self._job(number, rendered.text, tokens, one, on, timeline))
        return self._run(jobs, use_tqdm)

    # ------------------------------------------------------------------- others

    def get_tokenizer(self) -> Tokenizer:
        """Raises `InvalidRequest` for a model without one (``random:``)."""
        if self._text.tokenizer is None:
            raise InvalidRequest(
                f"model {self.info.model!r} has no tokenizer: give prompts as token ids", param="prompt"
            )
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        return default_params(self._text.generation)

    @property
    def stats(self) -> EngineStats:
        """The engine's latest gauges and totals."""
        return self._link.stats

    @property
    def kv_report(self) -> KVReport | None:
        """The latest of the KV cache's totals; None before the first."""
        return self._link.kv

    def close(self) -> None:
        """Stop the engine. Idempotent; also happens when the object is dropped or the program ends."""
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------- inside

    def _encode(self, text: str) -> array[int]:
        return self.get_tokenizer().encode(text)

    def _jobs(
        self,
        items: list[Prompt],
        params: list[SamplingParams],
        terms: list[Terms],
        pooling: PoolingKind | None = None,
    ) -> list[_Job]:
        jobs = []
        for number, (item, one, on) in enumerate(zip(items, params, terms, strict=True)):
            timeline = Timeline()
            timeline.stamp(Mark.TEMPLATED)
            text, ids = split_prompt(item)
            tokens = self._encode(text) if ids is None and text is not None else token_ids(ids or ())
            jobs.append(self._job(number, text, tokens, one, on, timeline, pooling))
        return jobs

    def _pool(
        self, prompts: list[Prompt], params: PoolingParams, truncate_prompt_tokens: int | None, *, use_tqdm: bool
    ) -> list[Pooled]:
        params.check_size(self.info.hidden_size)
        pooling, count = self._text.pooling, len(prompts)
        nothing = [pooling_params(truncate_prompt_tokens)] * count
        jobs = self._jobs(prompts, nothing, _terms_for(count, "p2", None, None), pooling.kind)
        outputs = self._run(jobs, use_tqdm)
        return [
            Pooled(list(output.prompt_token_ids), vectors.finish(job.so_far.pooled or b"", pooling, params))
            for job, output in zip(jobs, outputs, strict=True)
        ]

    def _params_for(self, count: int, given: Params) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        for one in given:
            if not isinstance(one, SamplingParams):
                raise InvalidRequest(
                    f"sampling_params must be SamplingParams or a list of them, got {type(one).__name__}",
                    param="sampling_params",
                )
        if len(given) != count:
            raise InvalidRequest(
                f"{len(given)} sampling parameters for {count} prompts: give one for all or one for each",
                param="sampling_params",
            )
        return list(given)

    def _job(
        self,
        number: int,
        text: str | None,
        tokens: array[int],
        params: SamplingParams,
        terms: Terms,
        timeline: Timeline,
        pooling: PoolingKind | None = None,
    ) -> _Job:
        timeline.stamp(Mark.TOKENIZED)
        params = spell(params, self._text.tokenizer)
        tokens = cut_as_asked(tokens, params, self.info.max_model_len)
        requests = self._admission.admit(tokens, params, timeline=timeline, terms=terms, pooling=pooling)
        tokenizer = self._text.tokenizer
        stop_ids = frozenset(requests[0].stop_ids)
        return _Job(
            number,
            requests,
            [Answer(index, params, stop_ids, tokenizer) for index in range(params.n)],
            Accumulator(str(number), text, tokens, params.n, tokenizer),
            RequestTimes(timeline),
        )

    def _run(self, jobs: list[_Job], show: bool) -> list[RequestOutput]:
        batch = _Batch(self._link, jobs)
        with _progress(len(jobs), show) as advance:
            try:
                for _ in batch.finished():
                    advance()
            finally:
                batch.abort()
        return [job.output() for job in jobs]


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt of a call, with its ``n`` answers."""

    number: int
    requests: list[EngineRequest]
    answers: list[Answer]
    so_far: Accumulator
    times: RequestTimes

    def output(self) -> RequestOutput:
        return self.so_far.output(cached_tokens=self.times.cached_tokens, metrics=self.times.timings())


class _Batch:
    """The requests of one call: a `Sink` that queues what comes for the caller's thread, which makes the text."""

    def __init__(self, link: EngineLink, jobs: list[_Job]) -> None:
        self._link = link
        self._live = {request.id: (job, index) for job in jobs for index, request in enumerate(job.requests)}
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._requests = [request for job in jobs for request in job.requests]
        self._held: deque[int] = deque()  # ids that the engine has no room for yet

    def deliver(self, delta: RequestDelta, ns: int) -> None:
        self._arrivals.put((delta, ns))

    keep = deliver

    def wake(self) -> None:
        """The caller's thread waits for arrivals itself."""

    def refuse(self, refusal: Refused) -> None:
        self._arrivals.put(refusal)

    def die(self, error: EngineDead) -> None:
        self._arrivals.put(error)

    def finished(self) -> Iterator[_Job]:
        """Start all requests, in one message; yields each job when its last answer has ended."""
        if self._requests:
            self._link.submit(self._requests, self)
        while self._live:
            try:
                arrival = self._arrivals.get(timeout=_CHECK_S)
            except queue.Empty:
                self._link.check()
                continue
            if isinstance(arrival, EngineDead):
                raise EngineDead(str(arrival))
            if isinstance(arrival, Refused):
                self._hold_back(arrival)
                continue
            live = len(self._live)
            gained = self._take(*arrival)
            self._send_again(live - len(self._live))
            if gained is not None and gained.so_far.finished:
                yield gained

    def _hold_back(self, refusal: Refused) -> None:
        """Whom the engine has no room for waits here until another request of this call has ended. Raises for one that
        it never takes, and when none of the call is left in it."""
        self._held.append(refusal.id)
        if refusal.retry_after_s is None or len(self._held) == len(self._live):
            raise refused(refusal, f"prompt {self._live[refusal.id][0].number}: ")

    def _send_again(self, count: int) -> None:
        """Up to ``count`` of those held back, the oldest first."""
        again = [self._live[self._held.popleft()] for _ in range(min(count, len(self._held)))]
        if again:
            self._link.submit([job.requests[index] for job, index in again], self)

    def abort(self) -> None:
        """End what has not ended: the caller was interrupted, or one of its requests was at fault."""
        live, self._live = list(self._live), {}
        self._link.abort(live)

    def _take(self, delta: RequestDelta, ns: int) -> _Job | None:
        """The job whose answer gained something; None when a stop string had ended the answer before."""
        found = self._live.get(delta.id)
        if found is None:
            return None
        job, index = found
        if delta.finish_reason == "error":
            raise failure(delta, f"prompt {job.number}: ")
        made = job.answers[index].push(delta.tokens, delta.logprobs, delta.finish_reason, delta.stop_reason)
        job.so_far.add(made)
        job.so_far.look(delta.prompt_logprobs)
        job.so_far.pooled = delta.pooled or job.so_far.pooled
        if index == 0:
            job.times.note_at_once(delta, ns)
        if made.finish_reason is not None:
            del self._live[delta.id]
            if delta.finish_reason is None:
                self._link.abort([delta.id], finished=True)
            if index == 0:
                job.times.finish(ns)
        return job


def _terms_for(count: int, classes: Classes, priorities: Priorities, hints: Hints) -> list[Terms]:
    named = [classes] * count if isinstance(classes, str) else list(classes)
    if priorities is None:
        priorities = 0
    ordered: list[Any] = list(priorities) if isinstance(priorities, list | tuple) else [priorities] * count
    hinted: list[Any] = list(hints) if isinstance(hints, list | tuple) else [hints] * count
    for param, what, given in (
        ("service_class", "service classes", named),
        ("priority", "priorities", ordered),
        ("cache_hint", "cache hints", hinted),
    ):
        if len(given) != count:
            raise InvalidRequest(
                f"{len(given)} {what} for {count} prompts: give one for all or one for each", param=param
            )
    for priority in ordered:
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidRequest(f"priority must be a whole number, got {priority!r:.80}", param="priority")
    return [
        Terms(service=class_named(one), priority=own, retention=retention_of(hint))
        for one, own, hint in zip(named, ordered, hinted, strict=True)
    ]


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    """Gives a function to call for each finished prompt."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)


def _stop(link: EngineLink) -> None:
    link.fail("it was closed", asked=True)
    link.handle.stop(_STOP_S)
