"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.timeline import Mark
from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call, unique_id
from firsttoken.server.decode import RequestDecoder, check_template_kwargs, decode_messages, off_loop
from firsttoken.server.encode import (
    ChunkWriter,
    TokenNames,
    chat_choice,
    chat_text_choice,
    stop_extra,
    to_json,
    token_ids_extra,
    usage,
)
from firsttoken.server.sampling import chat_params
from firsttoken.server.schema import ChatRequest
from firsttoken.server.service import agree
from firsttoken.server.state import AppState
from firsttoken.server.streaming import check_stream_options, deltas, named

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta, Generation

ROLE = b'{"role":"assistant","content":""}'
NOTHING = b"{}"
ELSEWHERE = {"prompt": "/v1/chat/completions takes messages; it is /v1/completions that takes prompt"}


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A request that may be answered."""

    request: ChatRequest
    generation: Generation
    params: SamplingParams
    prompt: array[int]
    tier: str

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.request.logprobs)

    @property
    def top(self) -> int:
        return self.params.logprobs or 0

    def usage(self) -> dict[str, Any]:
        done = self.generation
        return usage(done.prompt_tokens, done.completion_tokens, done.cached_tokens)

    def timings(self) -> dict[str, Any] | None:
        return self.generation.timings() if self.request.timings else None


class ChatRoute:
    """The handler of chat completions, for one application."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(ChatRequest, ELSEWHERE)
        self._names = TokenNames(state.llm.tokenizer)

    async def __call__(self, call: Call) -> None:
        job = await self._open(call)
        try:
            if job.request.stream:
                await self._stream(call, job)
            else:
                await self._whole(call, job)
        finally:
            job.generation.cancel()  # does nothing after the end

    # ------------------------------------------------------------------- the way in

    async def _open(self, call: Call) -> ChatJob:
        llm = self._state.llm
        body = await call.body(self._state.config.max_body_bytes)
        request, messages = await off_loop(len(body), self._decode, body)
        self._state.check_open()
        self._state.check_model(request.model)
        check_stream_options(request)
        params = chat_params(request, llm.generation_config)
        params.check_vocabulary(llm.info.vocab_size)
        terms, tier = agree(request, call.caller, call.timeline.times[0])
        kwargs = check_template_kwargs(request.chat_template_kwargs)
        if request.add_generation_prompt is not None:
            kwargs["add_generation_prompt"] = request.add_generation_prompt
        call.timeline.stamp(Mark.PARSED)
        rendered = await llm.render_chat(messages, cache_salt=terms.salt, **kwargs)
        call.timeline.stamp(Mark.TEMPLATED, rendered.templated_ns)
        call.timeline.stamp(Mark.TOKENIZED, rendered.tokenized_ns)
        try:
            generation = llm.open(rendered.ids, params, request_id=call.request_id, timeline=call.timeline, terms=terms)
        except InvalidRequest as error:
            raise named(error, "messages") from None
        call.generations.append(generation)
        call.response_id = unique_id("chatcmpl")
        return ChatJob(request, generation, params, rendered.ids, tier)

    def _decode(self, body: bytes) -> tuple[ChatRequest, list[dict[str, Any]]]:
        request = self._decoder.decode(body)
        messages = decode_messages(request.messages, self._state.prompt_limit, self._state.config.max_messages)
        return request, messages

    # -------------------------------------------------------------- streaming answer

    async def _stream(self, call: Call, job: ChatJob) -> None:
        options = job.request.stream_options
        writer = ChunkWriter(
            id_=call.response_id,
            kind="chat.completion.chunk",
            created=int(time.time()),
            model=self._state.llm.model_name,
            service_tier=job.tier,
            text_choice=chat_text_choice,
            usage_last=bool(options and options.include_usage),
            usage_always=bool(options and options.continuous_usage_stats),
        )
        begun: set[int] = set()
        simple = not (job.wants_logprobs or job.request.return_token_ids or writer.usage_always)
        unfinished = job.params.n
        # Headers wait for the first delta: until then a failure is a plain status, and both go out together.
        async for delta in deltas(job.generation, prompt_field="messages"):
            if not call.started:
                await call.start_stream()
            if simple and delta.finish_reason is None and delta.index in begun:
                if delta.text:
                    await call.write(writer.plain(delta.index, delta.text))
                continue
            if delta.finish_reason is not None:
                unfinished -= 1
            timings = job.timings() if unfinished == 0 else None
            events = self._events(writer, job, delta, begun, timings)
            if unfinished == 0:
                events += writer.last(job.usage(), timings)
            if events:
                await call.write(events, last=unfinished == 0)

    def _events(
        self, writer: ChunkWriter, job: ChatJob, delta: Delta, begun: set[int], timings: dict[str, Any] | None
    ) -> bytes:
        used = job.usage() if writer.usage_always else None
        events = b""
        if delta.index not in begun:
            extra = b""
            if job.request.return_token_ids and not begun:
                extra = b',"prompt_token_ids":' + to_json(job.prompt.tolist())
            begun.add(delta.index)
            events += writer.event(chat_choice(delta.index, ROLE, more=extra), used)
        asked_more = bool(delta.token_ids) and (job.wants_logprobs or bool(job.request.return_token_ids))
        if delta.text or asked_more:
            content = b'{"content":' + to_json(delta.text) + b"}"
            logprobs = b"null"
            if job.wants_logprobs:
                logprobs = to_json({"content": self._names.chat(delta, job.top), "refusal": None})
            more = token_ids_extra(delta, None) if job.request.return_token_ids else b""
            events += writer.event(chat_choice(delta.index, content, logprobs=logprobs, more=more), used)
        if delta.finish_reason is not None:
            finish = to_json(delta.finish_reason)
            events += writer.event(chat_choice(delta.index, NOTHING, finish, more=stop_extra(delta)), used, timings)
        return events

    # ------------------------------------------------------------------ whole answer

    async def _whole(self, call: Call, job: ChatJob) -> None:
        answers = [_Answer() for _ in range(job.params.n)]
        async for delta in deltas(job.generation, prompt_field="messages"):
            answer = answers[delta.index]
            answer.text.append(delta.text)
            answer.token_ids += delta.token_ids
            if job.wants_logprobs:
                answer.logprobs += self._names.chat(delta, job.top)
            if delta.finish_reason is not None:
                answer.last = delta
        timings = job.timings()
        body: dict[str, Any] = {
            "id": call.response_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._state.llm.model_name,
            "service_tier": job.tier,
            "choices": [self._choice(index, answer, job) for index, answer in enumerate(answers)],
            "usage": job.usage(),
        }
        if job.request.return_token_ids:
            body["prompt_token_ids"] = job.prompt.tolist()
        if timings is not None:
            body["timings"] = timings
        await call.reply(
            200, to_json(body), [(b"server-timing", server_timing_header(timings or job.generation.stages()).encode())]
        )

    def _choice(self, index: int, answer: _Answer, job: ChatJob) -> dict[str, Any]:
        assert answer.last is not None
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": {"content": answer.logprobs, "refusal": None} if job.wants_logprobs else None,
            "finish_reason": answer.last.finish_reason,
            "stop_reason": answer.last.stop_reason,
        }
        if job.request.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: Delta | None = None
