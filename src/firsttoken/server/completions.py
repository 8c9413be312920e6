"""``POST /v1/completions``: several prompts in one request, each with ``n`` answers."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.bad_words import spelt
from firsttoken.frontend.prompts import cut_as_asked
from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call, unique_id
from firsttoken.server.cost import allow
from firsttoken.server.decode import Prompt, RequestDecoder, decode_prompts, off_loop
from firsttoken.server.encode import (
    ChunkWriter,
    TokenNames,
    join_legacy,
    stop_extra,
    text_choice,
    to_json,
    token_ids_extra,
    usage,
)
from firsttoken.server.errors import bad_request
from firsttoken.server.prompt_logprobs import echoed, told
from firsttoken.server.sampling import completion_params, whole
from firsttoken.server.schema import CompletionRequest
from firsttoken.server.service import agree
from firsttoken.server.state import AppState
from firsttoken.server.streaming import check_stream_options, deltas, naming
from firsttoken.server.structured import grammar_field

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta, Generation

ELSEWHERE = {"messages": "/v1/completions takes prompt; it is /v1/chat/completions that takes messages"}


@dataclass(slots=True)
class _Part:
    """One prompt of the request. Its answers are the choices ``base`` to ``base + n - 1``."""

    base: int
    prompt: array[int]
    text: str | None  # the prompt as text, when it is to be echoed
    generation: Generation
    name: str  # what errors call it
    names: TokenNames
    held: str | None  # what errors call that which the answers are held to
    # Of the prompt's log-probabilities, where they are asked for and known: those of the echo, and vLLM's.
    echoed: dict[str, Any] | None = None
    told: list[dict[str, Any] | None] | None = None


@dataclass(slots=True)
class _Answer:
    """One choice so far. ``chars`` is where its next text begins, for ``text_offset``."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    chars: int = 0
    begun: bool = False
    last: Delta | None = None


@dataclass(slots=True)
class CompletionJob:
    """A request that may be answered."""

    request: CompletionRequest
    params: SamplingParams
    tier: str
    parts: list[_Part]
    answers: list[_Answer]

    def usage(self) -> dict[str, Any]:
        done = [part.generation for part in self.parts]
        return usage(
            sum(one.prompt_tokens for one in done),
            sum(one.completion_tokens for one in done),
            sum(one.cached_tokens for one in done),
        )

    def cancel(self) -> None:
        for part in self.parts:
            part.generation.cancel()  # does nothing after the end


class CompletionRoute:
    """The handler of completions, for one application."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(CompletionRequest, ELSEWHERE, ids="prompt")
        self._names = TokenNames(state.llm.tokenizer), TokenNames(None)

    async def __call__(self, call: Call) -> None:
        job = await self._open(call)
        try:
            if job.request.stream:
                await self._stream(call, job)
            else:
                await self._whole(call, job)
        finally:
            job.cancel()

    # ------------------------------------------------------------------- the way in

    async def _open(self, call: Call) -> CompletionJob:
        llm = self._state.llm
        body = await call.body(self._state.body_limit)
        request, prompts = await off_loop(len(body), self._decode, body)
        self._state.check_open()
        self._state.check_model(request.model)
        check_stream_options(request)
        params = completion_params(request, llm.generation_config)
        params = await spelt(params, llm.tokenizer)
        params.check_vocabulary(llm.info.vocab_size)
        held = grammar_field(request)
        if held is not None:
            await self._state.grammars.check(params.grammar, held)
        call.take_id(request.request_id)
        terms, tier = agree(request, call.caller, call.timeline.times[0])
        if len(prompts) * params.n > self._state.config.max_prompts:
            raise bad_request(
                f"{len(prompts)} prompts with n={params.n} make {len(prompts) * params.n} answers; "
                f"at most {self._state.config.max_prompts}",
                "n",
            )
        call.timeline.stamp(Mark.PARSED)
        call.timeline.stamp(Mark.TEMPLATED)
        special = request.add_special_tokens is not False
        names = [f"prompt[{index}]" for index in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
        encoded = await self._encode_all(prompts, names, special, terms.salt, params)
        texts = [
            await self._echo(prompt, ids, name, cut=params.truncate_prompt_tokens is not None) if request.echo else None
            for prompt, ids, name in zip(prompts, encoded, names, strict=True)
        ]
        call.timeline.stamp(Mark.TOKENIZED)
        allow(self._state, call, encoded, params)
        call.response_id = unique_id("cmpl")
        job = CompletionJob(request, params, tier, [], [_Answer() for _ in range(len(prompts) * params.n)])
        try:
            for index, (ids, text) in enumerate(zip(encoded, texts, strict=True)):
                # Each prompt has its own way from here on.
                timeline = Timeline(call.timeline.stamps()) if index else call.timeline
                with naming(names[index]):
                    generation = llm.open(ids, params, request_id=call.request_id, timeline=timeline, terms=terms)
                call.generations.append(generation)
                shown = self._names[bool(request.return_tokens_as_token_ids)]
                job.parts.append(_Part(index * params.n, ids, text, generation, names[index], shown, held))
        except BaseException:
            job.cancel()
            raise
        return job

    def _decode(self, body: bytes) -> tuple[CompletionRequest, list[Prompt]]:
        request = self._decoder.decode(body)
        prompts = decode_prompts(request.prompt, self._state.prompt_limit, self._state.config.max_prompts)
        if not prompts:
            raise bad_request("prompt is an empty list: send at least one prompt", "prompt", "empty_prompt")
        return request, prompts

    async def _encode_all(
        self, prompts: list[Prompt], names: list[str], special: bool, salt: str, params: SamplingParams
    ) -> list[array[int]]:
        batch, cut = len(prompts), params.truncate_prompt_tokens is not None
        work = [
            self._encode(prompt, name, special, batch, salt, cut=cut)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        encoded = [await work[0]] if batch == 1 else await asyncio.gather(*work)  # a single one needs no task
        context = self._state.llm.info.max_model_len
        return [cut_as_asked(ids, params, context) for ids in encoded]

    async def _encode(
        self, prompt: Prompt, name: str, special: bool, batch: int, salt: str, *, cut: bool
    ) -> array[int]:
        if not isinstance(prompt, str):
            return prompt
        with naming(name):
            llm = self._state.llm
            return await llm.encode(
                prompt,
                add_special_tokens=special,
                parse_special=self._state.parse_special,
                batch=batch,
                cache_salt=salt,
                cut=cut,
            )

    async def _echo(self, prompt: Prompt, ids: array[int], name: str, *, cut: bool) -> str:
        if isinstance(prompt, str) and not cut:
            return prompt
        tokenizer, info = self._state.llm.tokenizer, self._state.llm.info
        if tokenizer is None:
            raise bad_request("echo needs a tokenizer, and this model has none", "echo")
        if ids and max(ids) >= info.vocab_size:
            raise bad_request(
                f"{name}: token id {max(ids)} is outside the vocabulary (0 to {info.vocab_size - 1})", name
            )
        return await asyncio.to_thread(tokenizer.decode, ids)

    # ----------------------------------------------------------------------- answers

    async def _look(self, job: CompletionJob, part: _Part) -> None:
        """What is told of the prompt, once, before the first of its answers: it is known by then."""
        found = part.generation.prompt_logprobs
        if found is None or part.echoed is not None or part.told is not None:
            return
        top, asked = job.params.logprobs, whole("prompt_logprobs", job.request.prompt_logprobs)
        if job.request.echo and top is not None:
            part.echoed = await asyncio.to_thread(echoed, part.names, part.prompt, found, top)
        if asked is not None:
            part.told = await asyncio.to_thread(told, part.names, part.prompt, found, asked)

    def _take(self, job: CompletionJob, part: _Part, delta: Delta) -> tuple[_Answer, str, dict[str, Any] | None]:
        """Note a delta; returns its choice, the text to show (with the echo, once) and its log-probabilities."""
        answer = job.answers[part.base + delta.index]
        text = delta.text
        first, answer.begun = not answer.begun, True
        if first:
            text = (part.text or "") + text
        logprobs = None
        if job.params.logprobs is not None:
            # The echoed prompt's own go with the first text, in front of it.
            offset = answer.chars + len(text) - len(delta.text)
            logprobs = part.names.legacy(delta.token_ids, delta.logprobs or (), job.params.logprobs, offset)
            if first and part.echoed is not None:
                logprobs = join_legacy([part.echoed, logprobs])
        answer.chars += len(text)
        if delta.finish_reason is not None:
            answer.last = delta
        return answer, text, logprobs

    async def _stream(self, call: Call, job: CompletionJob) -> None:
        options = job.request.stream_options
        writer = ChunkWriter(
            id_=call.response_id,
            kind="text_completion",
            created=int(time.time()),
            model=self._state.llm.model_name,
            service_tier=job.tier,
            text_choice=text_choice,
            usage_last=bool(options and options.include_usage),
            usage_always=bool(options and options.continuous_usage_stats),
        )
        unfinished = len(job.answers)
        async with aclosing(_merged(job.parts)) as stream:
            async for part, delta in stream:
                # Headers wait for the first delta: until then a failure is a plain status.
                await self._look(job, part)
                if not call.started:
                    await call.start_stream()
                unfinished -= delta.finish_reason is not None
                timings = _last(call).timings() if unfinished == 0 and job.request.timings else None
                events = self._event(writer, job, part, delta, timings)
                if unfinished == 0:
                    events += writer.last(job.usage(), timings)
                if events:
                    await call.write(events, last=unfinished == 0)

    def _event(
        self, writer: ChunkWriter, job: CompletionJob, part: _Part, delta: Delta, timings: dict[str, Any] | None
    ) -> bytes:
        first = not job.answers[part.base + delta.index].begun
        _, text, logprobs = self._take(job, part, delta)
        ids = bool(job.request.return_token_ids)
        if not text and delta.finish_reason is None and not (delta.token_ids and (ids or logprobs)):
            return b""
        more = token_ids_extra(delta, part.prompt if first else None) if ids else b""
        finish = b"null"
        if delta.finish_reason is not None:
            finish = to_json(delta.finish_reason)
            more += stop_extra(delta)
        choice = text_choice(part.base + delta.index, to_json(text), finish, to_json(logprobs), more)
        return writer.event(choice, job.usage() if writer.usage_always else None, timings)

    async def _whole(self, call: Call, job: CompletionJob) -> None:
        async with aclosing(_merged(job.parts)) as stream:
            async for part, delta in stream:
                await self._look(job, part)
                answer, text, logprobs = self._take(job, part, delta)
                answer.text.append(text)
                answer.token_ids += delta.token_ids
                if logprobs is not None:
                    answer.logprobs.append(logprobs)
        timings = _last(call).timings() if job.request.timings else None
        body: dict[str, Any] = {
            "id": call.response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._state.llm.model_name,
            "service_tier": job.tier,
            "choices": [self._choice(index, job) for index in range(len(job.answers))],
            "usage": job.usage(),
        }
        if timings is not None:
            body["timings"] = timings
        await call.reply(
            200, to_json(body), [(b"server-timing", server_timing_header(timings or _last(call).stages()).encode())]
        )

    def _choice(self, index: int, job: CompletionJob) -> dict[str, Any]:
        answer = job.answers[index]
        assert answer.last is not None
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(answer.text),
            "logprobs": None if job.params.logprobs is None else join_legacy(answer.logprobs),
            "finish_reason": answer.last.finish_reason,
            "stop_reason": answer.last.stop_reason,
        }
        if job.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = job.parts[index // job.params.n].told
        if job.request.return_token_ids:
            choice["token_ids"] = answer.token_ids
            choice["prompt_token_ids"] = job.parts[index // job.params.n].prompt.tolist()
        return choice


def _last(call: Call) -> Generation:
    """Of the prompt whose answers ended last."""
    last = call.last
    assert last is not None
    return last


async def _merged(parts: list[_Part]) -> AsyncGenerator[tuple[_Part, Delta]]:
    """The deltas of all prompts as they come; the first error ends it."""
    if len(parts) == 1:
        async for delta in deltas(parts[0].generation, prompt_field=parts[0].name, grammar_field=parts[0].held):
            yield parts[0], delta
        return
    queue: asyncio.Queue[tuple[_Part, Delta] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(part, queue)) for part in parts]
    try:
        running = len(parts)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _feed(part: _Part, queue: asyncio.Queue[tuple[_Part, Delta] | Exception | None]) -> None:
    try:
        async for delta in deltas(part.generation, prompt_field=part.name, grammar_field=part.held):
            queue.put_nowait((part, delta))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
