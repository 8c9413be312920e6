"""Requests of other APIs, which are put in chat's words: honoured, or refused under the caller's own names."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from benchmarks.fuzz.pieces import Pieces
from benchmarks.fuzz.targets.text import check_refusal
from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.errors import InvalidRequest
from firsttoken.server.call import ANYBODY
from firsttoken.server.chat_tools import chat_tools
from firsttoken.server.decode import RequestDecoder, check_template_kwargs
from firsttoken.server.errors import ApiError, as_api_error
from firsttoken.server.messages.blocks import decode_turns
from firsttoken.server.messages.blocks import to_messages as of_turns
from firsttoken.server.messages.request import chat_request as of_message
from firsttoken.server.messages.request import names
from firsttoken.server.messages.schema import MessagesRequest
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.renamed import renamed
from firsttoken.server.responses.items import decode_input
from firsttoken.server.responses.items import to_messages as of_items
from firsttoken.server.responses.request import NAMES
from firsttoken.server.responses.request import chat_request as of_response
from firsttoken.server.responses.schema import ResponsesRequest
from firsttoken.server.sampling import chat_params
from firsttoken.server.schema import ChatRequest
from firsttoken.server.service import agree
from firsttoken.text.messages import normalize_messages

_RESPONSE = RequestDecoder(ResponsesRequest)
_MESSAGE = RequestDecoder(MessagesRequest)
_REFUSED = refused_fields(ChatRequest)
_DEFAULTS = GenerationConfig(eos_token_ids=(2,))
_LIMIT, _MOST = 4096, 16
_TEXT = {"type": "text", "text": "a"}
_ITEMS: tuple[Any, ...] = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
)
_TURNS: tuple[Any, ...] = (
    {"role": "user", "content": "hi"},
    {"role": "user", "content": [_TEXT, {"type": "tool_result", "tool_use_id": "c", "content": [_TEXT]}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}, _TEXT]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": ""}]},
    {"role": "system", "content": [_TEXT]},
)
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("tools", [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]),
    ("tools", [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("tool_choice", {"type": "tool", "name": "f", "disable_parallel_tool_use": True}),
    ("tool_choice", "required"),
    ("text", {"format": {"type": "json_schema", "name": "n", "schema": {}}}),
    ("output_config", {"effort": "low", "format": {"type": "json_schema", "schema": {}}}),
    ("reasoning", {"effort": "low"}),
    ("thinking", {"type": "disabled"}),
    ("include", ["message.output_text.logprobs"]),
    ("system", [_TEXT]),
    ("metadata", {"a": "b"}),
    ("cache_control", {"type": "ephemeral", "ttl": "1h"}),
)
_WORDS = ("type", "text", "content", "role", "id", "name", "call_id", "input", "output", "null", "50", "ephemeral")


def response(data: bytes) -> None:
    """The bytes say what a request for a response is made of. What is not refused is a chat that is well formed."""
    body = _body(Pieces(data), ResponsesRequest, "input", _ITEMS, {})
    try:
        found = _RESPONSE.decode(body)
        items = decode_input(found.input, _LIMIT, _MOST)
        with renamed(NAMES):
            _check(of_items(items), of_response(found))
    except (ApiError, InvalidRequest) as error:
        _check_refusal(error, ResponsesRequest)


def message(data: bytes) -> None:
    """The bytes say what a request for a message is made of. What is not refused is a chat that is well formed."""
    body = _body(Pieces(data), MessagesRequest, "messages", _TURNS, {"max_tokens": 9})
    try:
        found = _MESSAGE.decode(body)
        turns = decode_turns(found.messages, _LIMIT, _MOST)
        with renamed(names(found)):
            _check(of_turns(turns, found.system), of_message(found, turns))
    except (ApiError, InvalidRequest) as error:
        _check_refusal(error, MessagesRequest)


def _check(messages: list[dict[str, Any]], chat: ChatRequest) -> None:
    try:
        normalize_messages(messages)
    except InvalidRequest as error:
        raise AssertionError(f"{messages} are no chat: {error.message}") from error
    refuse_unimplemented(chat, _REFUSED)
    chat_params(chat, _DEFAULTS)
    agree(chat, ANYBODY, 1)
    chat_tools(chat, _LIMIT)
    check_template_kwargs(chat.chat_template_kwargs)


def _check_refusal(error: ApiError | InvalidRequest, struct: type[msgspec.Struct]) -> None:
    check_refusal(error)
    refused = as_api_error(error)
    if refused.param is not None and refused.code != "unknown_parameter":
        field = re.split(r"[.\[]", refused.param)[0]
        assert field in struct.__struct_fields__, f"{refused.param!r} is no field of the caller's: {refused.message}"


def _body(pieces: Pieces, struct: type[msgspec.Struct], name: str, given: tuple[Any, ...], least: Any) -> bytes:
    words = (*struct.__struct_fields__, *_WORDS)
    body = {**least, name: [_bent(given[pieces.below(len(given))], pieces, words) for _ in range(pieces.below(6))]}
    for _ in range(pieces.below(4)):
        pick = pieces.byte()
        if pick % 2:
            field, value = _FIELDS[pick // 2 % len(_FIELDS)]
            body[field] = _bent(value, pieces, words)
        else:
            body[words[pieces.byte() % len(struct.__struct_fields__)]] = pieces.value(words)
    return json.dumps(body).encode()


def _bent(value: Any, pieces: Pieces, words: tuple[str, ...]) -> Any:
    """The value, in which now and then something is another."""
    if pieces.below(12) == 11:
        return pieces.value(words)
    if isinstance(value, list):
        return [_bent(one, pieces, words) for one in value] * (2 if pieces.below(12) == 10 else 1)
    if isinstance(value, dict):
        bent = {key: _bent(one, pieces, words) for key, one in value.items()}
        if pieces.below(12) == 9:
            bent[words[pieces.byte() % len(words)]] = pieces.value(words)
        return bent
    return value
