"""``POST /v1/completions``: several prompts in one request, each with ``n`` answers."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.bad_words import spelt
from firsttoken.frontend.consumer import Rest
from firsttoken.frontend.flow import Source, Tell, flow
from firsttoken.frontend.prompts import cut_as_asked
from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call, unique_id
from firsttoken.server.cost import allow
from firsttoken.server.decode import Prompt, RequestDecoder, decode_prompts, off_loop
from firsttoken.server.encode import (
    ChunkWriter,
    MaybeTold,
    TokenNames,
    in_pieces,
    stop_extra,
    text_choice,
    to_json,
    token_ids_extra,
    told_of,
    usage,
)
from firsttoken.server.errors import bad_request
from firsttoken.server.kept_logprobs import KeptLogprobs
from firsttoken.server.prompt_logprobs import of_prompt, told
from firsttoken.server.sampling import completion_params, whole
from firsttoken.server.schema import CompletionRequest
from firsttoken.server.service import agree
from firsttoken.server.state import AppState
from firsttoken.server.streaming import check_stream_options, check_whole, naming, source
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


@dataclass(slots=True)
class _Answer:
    """One choice so far. ``chars`` is where its next text begins, for ``text_offset``. The rest is gathered of one that
    is told as a whole: there may be millions of tokens, so none has an object of its own."""

    chars: int = 0
    begun: bool = False
    last: Delta | None = None
    text: StringIO = field(default_factory=StringIO)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: KeptLogprobs | None = None
    offsets: array[int] = field(default_factory=lambda: array("q"))


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
            return await llm.tokenize(
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

    def _take(self, part: _Part, answer: _Answer, delta: Delta) -> tuple[str, int]:
        """Note a delta; returns the text to show (with the echo, once) and where the delta's own begins in all of the
        answer's, in characters."""
        text = delta.text
        if not answer.begun:
            answer.begun = True
            text = (part.text or "") + text
        offset = answer.chars + len(text) - len(delta.text)
        answer.chars += len(text)
        if delta.finish_reason is not None:
            answer.last = delta
        return text, offset

    def _logprobs(
        self, job: CompletionJob, part: _Part, found: Iterable[MaybeTold], offsets: Iterator[int], *, first: bool
    ) -> dict[str, Iterator[Any]] | None:
        """Those of an answer's tokens, behind the echoed prompt's where they are the ``first``; None where nobody
        asked. ``found`` is gone through several times."""
        top, told_of_prompt = job.params.logprobs, part.generation.prompt_logprobs
        if top is None:
            return None
        if not first or not job.request.echo or told_of_prompt is None:
            return part.names.legacy(lambda: found, top, offsets)
        all_offsets = chain(part.names.offsets(part.prompt, 0), offsets)
        return part.names.legacy(lambda: chain(of_prompt(part.prompt, told_of_prompt), found), top, all_offsets)

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
        frames = [writer.frame(index) for index in range(len(job.answers))]
        simple = not (writer.usage_always or job.request.return_token_ids or job.params.logprobs is not None)
        put = call.put

        async def edge(part: _Part, delta: Delta) -> None:
            nonlocal unfinished
            # Headers wait for the first delta: until then a failure is a plain status.
            if not call.started:
                await call.start_stream()
            unfinished -= delta.finish_reason is not None
            timings = _last(call).timings() if unfinished == 0 and job.request.timings else None
            event = self._event(writer, job, part, delta, timings)
            end = writer.last(job.usage(), timings) if unfinished == 0 else b""
            if not isinstance(event, bytes):
                await call.write_pieces(chain(event, (end,)), last=unfinished == 0)
            elif event or end:
                await call.write(event + end, last=unfinished == 0)

        def tell(part: _Part, delta: Delta) -> Rest:
            index = part.base + delta.index
            if delta.finish_reason is not None:
                check_whole(delta)
                return edge(part, delta)
            if not job.answers[index].begun:
                return edge(part, delta)
            if simple:  # nearly always
                before, after = frames[index]
                return put(before + to_json(delta.text) + after) if delta.text else None
            event = self._event(writer, job, part, delta, None)
            assert isinstance(event, bytes), "what is longer comes with the first"
            return put(event) if event else None

        await _flow(job, tell)

    def _event(
        self, writer: ChunkWriter, job: CompletionJob, part: _Part, delta: Delta, timings: dict[str, Any] | None
    ) -> bytes | Iterator[bytes]:
        """The event of a delta, b"" for none; in pieces where an echoed prompt's log-probabilities are in it."""
        answer = job.answers[part.base + delta.index]
        first = not answer.begun
        text, offset = self._take(part, answer, delta)
        ids, probabilities = bool(job.request.return_token_ids), job.params.logprobs is not None
        if not text and delta.finish_reason is None and not (delta.token_ids and (ids or probabilities)):
            return b""
        more = token_ids_extra(delta, part.prompt if first else None) if ids else b""
        finish = b"null"
        if delta.finish_reason is not None:
            finish = to_json(delta.finish_reason)
            more += stop_extra(delta)
        logprobs = b"\0" if probabilities else b"null"
        choice = text_choice(part.base + delta.index, to_json(text), finish, logprobs, more)
        event = writer.event(choice, job.usage() if writer.usage_always else None, timings)
        if not probabilities:
            return event
        offsets = part.names.offsets(delta.token_ids, offset)
        before, _, after = event.partition(b"\0")
        pieces = in_pieces(self._logprobs(job, part, list(told_of(delta)), offsets, first=first))
        pieces = chain((before,), pieces, (after,))
        return pieces if first and job.request.echo else b"".join(pieces)

    async def _whole(self, call: Call, job: CompletionJob) -> None:
        def take(part: _Part, delta: Delta) -> None:
            if delta.finish_reason is not None:
                check_whole(delta)
            answer = job.answers[part.base + delta.index]
            text, offset = self._take(part, answer, delta)
            answer.text.write(text)
            if job.request.return_token_ids:
                answer.token_ids.extend(delta.token_ids)
            if job.params.logprobs is not None:
                if answer.logprobs is None:
                    answer.logprobs = KeptLogprobs(job.params.logprobs)
                answer.logprobs.add(told_of(delta))
                answer.offsets.extend(part.names.offsets(delta.token_ids, offset))

        await _flow(job, take)
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
            200, in_pieces(body), [(b"server-timing", server_timing_header(timings or _last(call).stages()).encode())]
        )

    def _choice(self, index: int, job: CompletionJob) -> dict[str, Any]:
        answer, part = job.answers[index], job.parts[index // job.params.n]
        assert answer.last is not None
        choice: dict[str, Any] = {
            "index": index,
            "text": answer.text.getvalue(),
            "logprobs": self._logprobs(job, part, answer.logprobs or (), iter(answer.offsets), first=True),
            "finish_reason": answer.last.finish_reason,
            "stop_reason": answer.last.stop_reason,
        }
        asked, found = whole("prompt_logprobs", job.request.prompt_logprobs), part.generation.prompt_logprobs
        if asked is not None:
            choice["prompt_logprobs"] = None if found is None else told(part.names, part.prompt, found, asked)
        if job.request.return_token_ids:
            choice["token_ids"] = iter(answer.token_ids)
            choice["prompt_token_ids"] = part.prompt.tolist()
        return choice


def _last(call: Call) -> Generation:
    """Of the prompt whose answers ended last."""
    last = call.last
    assert last is not None
    return last


async def _flow(job: CompletionJob, tell: Callable[[_Part, Delta], Rest]) -> None:
    """Give the deltas of all prompts to ``tell`` as they come; the first error ends it."""
    await flow(*[_source(part, partial(tell, part)) for part in job.parts])


def _source(part: _Part, tell: Tell) -> Source:
    return source(part.generation, tell, prompt_field=part.name, grammar_field=part.held)
