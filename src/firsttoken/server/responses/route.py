"""``POST /v1/responses``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call
from firsttoken.server.chat_ask import chat_ask
from firsttoken.server.conversation import Conversation, Said, open_conversation
from firsttoken.server.decode import RequestDecoder, off_loop
from firsttoken.server.encode import TokenNames, in_pieces, to_json
from firsttoken.server.errors import bad_request
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.renamed import advised, renamed
from firsttoken.server.responses.body import Head, described, ended, usage_of
from firsttoken.server.responses.events import ResponseEvents, TokenProbabilities
from firsttoken.server.responses.items import decode_input, to_messages
from firsttoken.server.responses.kept import not_found
from firsttoken.server.responses.output import Output, new_id
from firsttoken.server.responses.request import NAMES, chat_request
from firsttoken.server.responses.schema import Item, ResponsesRequest
from firsttoken.server.responses.store import Kept, ResponseStore
from firsttoken.server.schema import ChatRequest
from firsttoken.server.state import AppState
from firsttoken.text.pieces import Content

_ELSEWHERE = {
    "messages": "/v1/responses takes input; it is /v1/chat/completions that takes messages",
    "max_tokens": "here it is called max_output_tokens",
    "max_completion_tokens": "here it is called max_output_tokens",
    "response_format": "here it is called text.format",
    "reasoning_effort": "here it is called reasoning.effort",
    "n": "a response has one answer",
}
_TYPES = (
    (r"input\[\d+\]\.type", "supported are message, function_call, function_call_output and reasoning"),
    (r"input\[\d+\]\.content\[\d+\]\.type", "supported are input_text, output_text and refusal"),
    (r"input\[\d+\]\.output\[\d+\]\.type", "only input_text is supported"),
    (r"tools\[\d+\]\.type", "this server has no tools of its own: only function is supported"),
    (r"tool_choice(\.type)?", "send none, auto, required, or a function by its name"),
    (r"text\.format\.type", "supported are text, json_object and json_schema"),
)
_REFUSED = refused_fields(ChatRequest)
_SAID = msgspec.json.Decoder(list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that may be answered."""

    request: ResponsesRequest
    conversation: Conversation
    head: Head
    asked: list[bytes]
    """The messages of its input, encoded, where it is kept."""

    def described(self) -> dict[str, Any]:
        return described(self.request, self.conversation, self.head)


class ResponsesRoute:
    """The handler of new responses, for one application."""

    def __init__(self, state: AppState, store: ResponseStore) -> None:
        self._state = state
        self._store = store
        self._decoder = RequestDecoder(ResponsesRequest, _ELSEWHERE)
        self._names = TokenNames(state.llm.tokenizer)

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        with advised(_TYPES):
            request, items = await off_loop(len(body), self._decode, body)
        with renamed(NAMES):
            job = await self._open(call, request, items)
            try:
                if job.request.stream:
                    await self._stream(call, job)
                else:
                    await self._whole(call, job)
            finally:
                job.conversation.cancel()

    # ------------------------------------------------------------------- the way in

    async def _open(self, call: Call, request: ResponsesRequest, items: list[Item]) -> _Job:
        state = self._state
        self._check_store(request)
        before = self._chain(call, request)
        kept = bool(self._store.capacity) and request.store is not False
        size = len(memoryview(request.input)) + sum(len(one.said) for one in before)
        messages, asked = await off_loop(size, self._messages, before, items, request.instructions)
        chat = chat_request(request)
        refuse_unimplemented(chat, _REFUSED)
        ask, tier = chat_ask(state, call, chat, messages)
        conversation = await open_conversation(state, call, ask)
        call.response_id = new_id("resp")
        head = Head(call.response_id, int(time.time()), state.llm.model_name, tier, kept)
        return _Job(request, conversation, head, [to_json(one) for one in asked] if kept else [])

    def _decode(self, body: bytes) -> tuple[ResponsesRequest, list[Item]]:
        request = self._decoder.decode(body)
        items = decode_input(request.input, self._state.prompt_limit, self._state.config.max_messages)
        return request, items

    def _check_store(self, request: ResponsesRequest) -> None:
        if self._store.capacity:
            return
        for name, asked in (("store", request.store), ("previous_response_id", request.previous_response_id)):
            if asked:
                why = "this server keeps no responses (--responses-store 0): send the whole conversation as input"
                raise bad_request(f"{name}: {why}", name, "unsupported_parameter")

    def _chain(self, call: Call, request: ResponsesRequest) -> list[Kept]:
        """The responses that it goes on from, oldest first."""
        id_ = request.previous_response_id
        if id_ is None:
            return []
        found = self._store.chain(call.caller.tenant, id_)
        if isinstance(found, str):
            raise not_found(found, self._store, "previous_response_id", before=None if found == id_ else id_)
        size = sum(len(one.said) for one in found)
        if size > self._state.prompt_limit:
            raise bad_request(
                f"the responses before it take {size} bytes of JSON, more than this model's context can hold "
                f"({self._state.prompt_limit} at most); begin a new conversation",
                "previous_response_id",
                "context_length_exceeded",
            )
        return found

    def _messages(
        self, before: list[Kept], items: list[Item], instructions: str | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All messages of the chat, and those of the input alone."""
        past = [message for kept in before for message in _SAID.decode(kept.said)]
        most = self._state.config.max_messages
        if len(past) + len(items) > most:
            raise bad_request(
                f"input and the responses before it hold {len(past) + len(items)} messages; at most {most}",
                "previous_response_id",
            )
        asked = to_messages(items, past)
        told = [] if instructions is None else [{"role": "system", "content": instructions}]
        return [*told, *past, *asked], asked

    # ------------------------------------------------------------------------ answers

    async def _stream(self, call: Call, job: _Job) -> None:
        conversation = job.conversation
        start = job.described()
        writer = ResponseEvents(start, TokenProbabilities(self._names, conversation.params.logprobs))

        async def edge(said: Said) -> None:
            held: list[bytes] = []
            # Headers wait for the first delta, as in chat: until then a failure is a plain status.
            if not call.started:
                await call.start_stream()
                call.dialect = writer
                held.append(writer.begin())
            long = writer.long(said)
            if long:
                await call.write_pieces(chain(held, writer.events(said)))
                held = []
            else:
                held += writer.events(said)
            if said.finish_reason is not None:
                response = await self._ended(call, job, start, writer.output, said.finish_reason)
                event = writer.ended((response,) if isinstance(response, bytes) else response, said.finish_reason)
                if long:
                    await call.write_pieces(event, last=True)
                else:
                    await call.write(b"".join([*held, *event]), last=True)
            elif held:
                await call.write(b"".join(held))

        await conversation.write(call, writer, edge)

    async def _whole(self, call: Call, job: _Job) -> None:
        conversation = job.conversation
        probabilities = TokenProbabilities(self._names, conversation.params.logprobs)
        output = Output(probabilities.kept)
        reason = ""

        def add(said: Said) -> None:
            nonlocal reason
            logprobs = probabilities.take(said)
            for piece in said.pieces:
                output.take(piece)
                if type(piece) is Content:
                    output.note(logprobs)
                    logprobs = []
            if said.finish_reason is not None:
                reason = said.finish_reason
                output.end(complete=reason != "length", logprobs=logprobs)

        await conversation.read(add)
        response = await self._ended(call, job, job.described(), output, reason)
        header = server_timing_header(conversation.generation.stages())
        await call.reply(200, response, [(b"server-timing", header.encode())])

    async def _ended(
        self, call: Call, job: _Job, start: dict[str, Any], output: Output, finish_reason: str
    ) -> bytes | Iterator[bytes]:
        """The response as it is in the end, encoded; whole where it is kept, as it is from here on, else in pieces."""
        conversation, request = job.conversation, job.request
        timings = conversation.generation.timings() if request.timings else None
        pieces = in_pieces(ended(start, output.shown(), finish_reason, usage_of(conversation), timings))
        if not job.head.kept:
            return pieces
        if conversation.params.logprobs is None:
            response = b"".join(pieces)
        else:
            response = await asyncio.to_thread(b"".join, pieces)
        said = b",".join([*job.asked, *map(to_json, to_messages(output.given_back()))])
        kept = Kept(job.head.id, response, bytes(request.input), b"[" + said + b"]", request.previous_response_id)
        self._store.put(call.caller.tenant, kept)
        return response
