"""Bodies of requests: honoured, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.fuzz.pieces import Pieces
from benchmarks.fuzz.targets.text import check_refusal
from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.errors import InvalidRequest
from firsttoken.server.call import ANYBODY
from firsttoken.server.decode import RequestDecoder, check_template_kwargs, decode_ids, decode_messages, decode_prompts
from firsttoken.server.errors import ApiError
from firsttoken.server.sampling import chat_params, completion_params
from firsttoken.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from firsttoken.server.service import agree
from firsttoken.server.streaming import check_stream_options

_CHAT = RequestDecoder(ChatRequest)
_COMPLETION = RequestDecoder(CompletionRequest)
_TOKENIZE = RequestDecoder(TokenizeRequest)
_DETOKENIZE = RequestDecoder(DetokenizeRequest)
_DEFAULTS = GenerationConfig(eos_token_ids=(2,))
_VOCABULARY = 100
_LIMIT = 4096


def request(data: bytes) -> None:
    """The first byte names the route, the second says whether the rest is the body, or what its JSON is made of."""
    pieces = Pieces(data)
    take, struct = _ROUTES[pieces.below(4)]
    body = data[2:] if pieces.below(8) == 0 else json.dumps(_body(pieces, struct)).encode()
    try:
        take(body)
    except (ApiError, InvalidRequest) as error:
        check_refusal(error)


def _body(pieces: Pieces, struct: type[msgspec.Struct]) -> dict[str, Any]:
    words = (*struct.__struct_fields__, *_WORDS)
    found: dict[str, Any] = {}
    if pieces.below(8):
        found["messages" if struct is ChatRequest else "prompt"] = (
            [{"role": "user", "content": "hi"}] if struct is ChatRequest else "hi"
        )
    for _ in range(pieces.below(5)):
        found[words[pieces.byte() % len(struct.__struct_fields__)]] = pieces.value(words)
    return found


def _chat(body: bytes) -> None:
    found = _CHAT.decode(body)
    decode_messages(found.messages, _LIMIT, 8)
    check_stream_options(found)
    chat_params(found, _DEFAULTS).check_vocabulary(_VOCABULARY)
    check_template_kwargs(found.chat_template_kwargs)
    _agree(found)


def _completion(body: bytes) -> None:
    found = _COMPLETION.decode(body)
    prompts = decode_prompts(found.prompt, _LIMIT, 8)
    assert len(prompts) <= 8
    check_stream_options(found)
    completion_params(found, _DEFAULTS).check_vocabulary(_VOCABULARY)
    _agree(found)


def _agree(found: Any) -> None:
    terms, tier = agree(found, ANYBODY, 1)
    assert terms.deadline_ns >= 0
    assert tier


def _tokenize(body: bytes) -> None:
    _TOKENIZE.decode(body)


def _detokenize(body: bytes) -> None:
    found = _DETOKENIZE.decode(body)
    decode_ids(found.tokens, "tokens", _LIMIT)


_ROUTES: tuple[tuple[Callable[[bytes], None], type[msgspec.Struct]], ...] = (
    (_chat, ChatRequest),
    (_completion, CompletionRequest),
    (_tokenize, TokenizeRequest),
    (_detokenize, DetokenizeRequest),
)
_WORDS = ("p0", "p2", "flex", "auto", "tool_result", "ttl_s", "until", "priority", "include_usage", "50", "-1", "abc")
