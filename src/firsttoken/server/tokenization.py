"""``POST /tokenize`` and ``POST /detokenize``, as vLLM's."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from firsttoken.server.call import Call
from firsttoken.server.chat_tools import offered
from firsttoken.server.decode import (
    RequestDecoder,
    check_template_kwargs,
    decode_ids,
    decode_messages,
    decode_text,
    is_absent,
    off_loop,
)
from firsttoken.server.encode import TokenNames, to_json
from firsttoken.server.errors import bad_request
from firsttoken.server.schema import DetokenizeRequest, TokenizeRequest
from firsttoken.server.state import AppState
from firsttoken.server.template_inputs import adds_prompt

_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeRoute:
    """Text or messages to token ids."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(TokenizeRequest)
        self._names = TokenNames(state.llm.tokenizer)

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        request, prompt, messages = await off_loop(len(body), self._decode, body)
        self._state.check_model(request.model)
        ids = await self._ids(request, prompt, messages, call.caller.salt)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._state.llm.info.max_model_len,
            "tokens": ids.tolist(),
            "token_strs": None,
        }
        if request.return_token_strs:
            answer["token_strs"] = [self._names.raw(token).decode("utf-8", "replace") for token in ids]
        await call.reply(200, to_json(answer))

    def _decode(self, body: bytes) -> tuple[TokenizeRequest, str | None, list[dict[str, Any]] | None]:
        request = self._decoder.decode(body)
        if is_absent(request.prompt) == is_absent(request.messages):
            raise bad_request("send either prompt or messages", "prompt", "missing_parameter")
        limit = self._state.prompt_limit
        if is_absent(request.messages):
            return request, decode_text(request.prompt, "prompt", limit), None
        return request, None, decode_messages(request.messages, limit, self._state.config.max_messages)

    async def _ids(
        self, request: TokenizeRequest, prompt: str | None, messages: list[dict[str, Any]] | None, salt: str
    ) -> array[int]:
        llm = self._state.llm
        if messages is None:
            if any(getattr(request, name) not in (None, False) for name in _OF_CHATS):
                raise bad_request(f"{', '.join(_OF_CHATS)} need messages", "messages")
            assert prompt is not None
            special = request.add_special_tokens is not False
            return await llm.tokenize(
                prompt, add_special_tokens=special, parse_special=self._state.parse_special, cache_salt=salt
            )
        if request.add_special_tokens:
            raise bad_request("add_special_tokens is not supported with messages: the template writes them", "messages")
        tools = offered(request.tools, self._state.prompt_limit)
        rendered = await llm.render_chat(
            messages,
            add_generation_prompt=adds_prompt(request),
            continue_final_message=bool(request.continue_final_message),
            tools=[tool.definition() for tool in tools],
            cache_salt=salt,
            **check_template_kwargs(request.chat_template_kwargs),
        )
        ids: array[int] = rendered.ids
        return ids


class DetokenizeRoute:
    """Token ids to text."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(DetokenizeRequest, ids="tokens")

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        request, ids = await off_loop(len(body), self._decode, body)
        self._state.check_model(request.model)
        llm = self._state.llm
        if llm.tokenizer is None:
            raise bad_request("this model has no tokenizer: it works on token ids only", "tokens")
        if ids and max(ids) >= llm.info.vocab_size:
            last = llm.info.vocab_size - 1
            raise bad_request(f"tokens: token id {max(ids)} is outside the vocabulary (0 to {last})", "tokens")
        text = await asyncio.to_thread(llm.tokenizer.decode, ids)
        await call.reply(200, to_json({"prompt": text}))

    def _decode(self, body: bytes) -> tuple[DetokenizeRequest, array[int]]:
        request = self._decoder.decode(body)
        if is_absent(request.tokens):
            raise bad_request("tokens is required: a list of token ids", "tokens", "missing_parameter")
        return request, decode_ids(request.tokens, "tokens", self._state.prompt_limit)
