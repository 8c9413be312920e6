"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call, unique_id
from firsttoken.server.chat_answers import ChatStream, Message
from firsttoken.server.chat_ask import chat_ask
from firsttoken.server.conversation import Conversation, Said, open_conversation
from firsttoken.server.decode import RequestDecoder, decode_messages, off_loop
from firsttoken.server.encode import ChunkWriter, TokenNames, chat_text_choice, in_pieces, usage
from firsttoken.server.prompt_logprobs import told
from firsttoken.server.schema import ChatRequest
from firsttoken.server.state import AppState
from firsttoken.server.streaming import check_stream_options

ELSEWHERE = {"prompt": "/v1/chat/completions takes messages; it is /v1/completions that takes prompt"}


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A request that may be answered."""

    request: ChatRequest
    conversation: Conversation
    tier: str

    def usage(self) -> dict[str, Any]:
        done = self.conversation.generation
        reasoning = self.conversation.reasoning_tokens
        return usage(done.prompt_tokens, done.completion_tokens, done.cached_tokens, reasoning)

    def timings(self) -> dict[str, Any] | None:
        return self.conversation.generation.timings() if self.request.timings else None


class ChatRoute:
    """The handler of chat completions, for one application."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(ChatRequest, ELSEWHERE)
        self._names = TokenNames(state.llm.tokenizer), TokenNames(None)

    async def __call__(self, call: Call) -> None:
        job = await self._open(call)
        try:
            if job.request.stream:
                await self._stream(call, job)
            else:
                await self._whole(call, job)
        finally:
            job.conversation.cancel()

    # ------------------------------------------------------------------- the way in

    async def _open(self, call: Call) -> ChatJob:
        state = self._state
        body = await call.body(state.body_limit)
        request, messages = await off_loop(len(body), self._decode, body)
        check_stream_options(request)
        ask, tier = chat_ask(state, call, request, messages)
        conversation = await open_conversation(state, call, ask)
        call.response_id = unique_id("chatcmpl")
        return ChatJob(request, conversation, tier)

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
        names = self._names[bool(job.request.return_tokens_as_token_ids)]
        stream = ChatStream(
            writer, job.conversation, names, token_ids=bool(job.request.return_token_ids), usage=job.usage
        )
        unfinished = job.conversation.params.n

        async def edge(said: Said) -> None:
            nonlocal unfinished
            # Headers wait for the first delta: until then a failure is a plain status, and both go out together.
            if not call.started:
                await call.start_stream()
            if said.finish_reason is not None:
                unfinished -= 1
            timings = job.timings() if unfinished == 0 else None
            events = stream.events(said, timings)
            if unfinished == 0:
                events += writer.last(job.usage(), timings)
            if events:
                await call.write(events, last=unfinished == 0)

        await job.conversation.write(call, stream, edge)

    # ------------------------------------------------------------------ whole answer

    async def _whole(self, call: Call, job: ChatJob) -> None:
        conversation, names = job.conversation, self._names[bool(job.request.return_tokens_as_token_ids)]
        token_ids = bool(job.request.return_token_ids)
        answers = [Message(index, conversation, names, token_ids=token_ids) for index in range(conversation.params.n)]
        await conversation.read(lambda said: answers[said.delta.index].add(said))
        timings = job.timings()
        body: dict[str, Any] = {
            "id": call.response_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._state.llm.model_name,
            "service_tier": job.tier,
            "choices": [answer.choice() for answer in answers],
            "usage": job.usage(),
        }
        if token_ids:
            body["prompt_token_ids"] = conversation.prompt.tolist()
        if conversation.generation.prompt_logprobs is not None:
            found, top = conversation.generation.prompt_logprobs, conversation.params.prompt_logprobs or 0
            body["prompt_logprobs"] = told(names, conversation.prompt, found, top)
        if timings is not None:
            body["timings"] = timings
        header = server_timing_header(timings or conversation.generation.stages())
        await call.reply(200, in_pieces(body), [(b"server-timing", header.encode())])
