"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call
from firsttoken.server.chat_ask import chat_ask
from firsttoken.server.conversation import Conversation, Said, open_conversation, render
from firsttoken.server.decode import RequestDecoder, off_loop
from firsttoken.server.encode import to_json
from firsttoken.server.messages.answer import Blocks, stop_of, usage_of
from firsttoken.server.messages.blocks import decode_turns, to_messages
from firsttoken.server.messages.events import MessageEvents
from firsttoken.server.messages.request import chat_request, names, prompt_request
from firsttoken.server.messages.schema import CountTokensRequest, InputMessage, MessagesRequest
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.renamed import advised, renamed
from firsttoken.server.responses.output import new_id
from firsttoken.server.schema import ChatRequest
from firsttoken.server.state import AppState

_ELSEWHERE = {
    "stop": "here it is called stop_sequences",
    "max_completion_tokens": "here it is called max_tokens",
    "response_format": "here it is called output_config.format",
    "n": "a message is one answer",
}
_TYPES = (
    (r"messages\[\d+\]\.content\[\d+\]\.type", "supported are text, thinking, tool_use and tool_result"),
    (r"(messages\[\d+\]\.content\[\d+\]\.content|system)\[\d+\]\.type", "only text is supported"),
    (r"tools\[\d+\](\.type)?", "this server has no tools of its own: send a name and an input_schema"),
    (
        r"thinking\.type",
        "supported are adaptive and disabled: how many tokens a model thinks cannot be bounded but by max_tokens",
    ),
)
_REFUSED = refused_fields(ChatRequest)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that may be answered."""

    request: MessagesRequest
    conversation: Conversation
    id: str
    model: str
    tier: str

    def message(self, content: list[dict[str, Any]], stop: tuple[str | None, str | None]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop[0],
            "stop_sequence": stop[1],
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, Any]:
        return usage_of(self.conversation, self.tier)

    def timings(self) -> dict[str, Any] | None:
        return self.conversation.generation.timings() if self.request.timings else None


class MessagesRoute:
    """The handler of messages, for one application."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(MessagesRequest, _ELSEWHERE)

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        with advised(_TYPES):
            request, turns, messages = await off_loop(len(body), self._decode, body)
        with renamed(names(request)):
            job = await self._open(call, request, turns, messages)
            try:
                if request.stream:
                    await self._stream(call, job)
                else:
                    await self._whole(call, job)
            finally:
                job.conversation.cancel()

    async def _open(
        self, call: Call, request: MessagesRequest, turns: list[InputMessage], messages: list[dict[str, Any]]
    ) -> _Job:
        state = self._state
        chat = chat_request(request, turns)
        refuse_unimplemented(chat, _REFUSED)
        ask, tier = chat_ask(state, call, chat, messages)
        conversation = await open_conversation(state, call, ask)
        call.response_id = new_id("msg")
        return _Job(request, conversation, call.response_id, state.llm.model_name, tier)

    def _decode(self, body: bytes) -> tuple[MessagesRequest, list[InputMessage], list[dict[str, Any]]]:
        request = self._decoder.decode(body)
        turns = decode_turns(request.messages, self._state.prompt_limit, self._state.config.max_messages)
        return request, turns, to_messages(turns, request.system)

    async def _stream(self, call: Call, job: _Job) -> None:
        writer = MessageEvents()

        async def edge(said: Said) -> None:
            events = b""
            # Headers wait for the first delta, as in chat: until then a failure is a plain status.
            if not call.started:
                await call.start_stream()
                events = writer.begin(job.message([], (None, None)))
            events += writer.more(said.pieces)
            if said.finish_reason is not None:
                events += writer.end(stop_of(job.conversation, said), job.usage(), job.timings())
            if events:
                await call.write(events, last=said.finish_reason is not None)

        await job.conversation.write(call, writer, edge)

    async def _whole(self, call: Call, job: _Job) -> None:
        blocks = Blocks()
        stop: tuple[str | None, str | None] = (None, None)

        def add(said: Said) -> None:
            nonlocal stop
            blocks.add(said.pieces)
            if said.finish_reason is not None:
                stop = stop_of(job.conversation, said)

        await job.conversation.read(add)
        body = job.message(blocks.shown(), stop)
        timings = job.timings()
        if timings is not None:
            body["timings"] = timings
        header = server_timing_header(timings or job.conversation.generation.stages())
        await call.reply(200, to_json(body), [(b"server-timing", header.encode())])


class CountTokensRoute:
    """The handler of the count of a prompt's tokens."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(CountTokensRequest)

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        with advised(_TYPES):
            request, turns, messages = await off_loop(len(body), self._decode, body)
        with renamed(names(request)):
            chat = prompt_request(request, turns)
            refuse_unimplemented(chat, _REFUSED)
            ask, _ = chat_ask(self._state, call, chat, messages)
            rendered = await render(self._state, ask)
        await call.reply(200, to_json({"input_tokens": len(rendered.ids)}))

    def _decode(self, body: bytes) -> tuple[CountTokensRequest, list[InputMessage], list[dict[str, Any]]]:
        request = self._decoder.decode(body)
        turns = decode_turns(request.messages, self._state.prompt_limit, self._state.config.max_messages)
        return request, turns, to_messages(turns, request.system)
