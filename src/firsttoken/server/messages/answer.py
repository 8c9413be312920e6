"""What is told of an answer, beside what was said: why it ended, and the tokens that it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from firsttoken.text.pieces import CallArguments, CallStart, Content, Piece, Reasoning

if TYPE_CHECKING:
    from firsttoken.server.conversation import Conversation, Said

_STANDARD = frozenset({"default", "flex", "p2"})


def stop_of(conversation: Conversation, said: Said) -> tuple[str, str | None]:
    """``stop_reason`` and ``stop_sequence`` of an answer that ends with ``said``."""
    if said.finish_reason == "tool_calls":
        return "tool_use", None
    if said.finish_reason == "length":
        most = conversation.params.max_tokens
        whole = most is not None and conversation.generation.completion_tokens >= most
        return "max_tokens" if whole else "model_context_window_exceeded", None
    if isinstance(said.delta.stop_reason, str):
        return "stop_sequence", said.delta.stop_reason
    return "end_turn", None


def usage_of(conversation: Conversation, tier: str) -> dict[str, Any]:
    """The tokens so far: ``input_tokens`` are those that were not found in the cache. To write to it costs nothing."""
    done = conversation.generation
    used: dict[str, Any] = {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.completion_tokens,
        "service_tier": "standard" if tier in _STANDARD else "priority",
    }
    if conversation.reasoning_tokens is not None:
        used["output_tokens_details"] = {"thinking_tokens": conversation.reasoning_tokens}
    return used


class Blocks:
    """The blocks of a whole answer, as it comes."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Piece, list[str]]] = []  # what began each, and its texts

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if begins(piece, self._blocks[-1][0] if self._blocks else None):
                self._blocks.append((piece, []))
            self._blocks[-1][1].append(text_of(piece))

    def shown(self) -> list[dict[str, Any]]:
        return [_shown(first, "".join(texts)) for first, texts in self._blocks]


def begins(piece: Piece, before: Piece | None) -> bool:
    """Whether ``piece`` begins a block, after one that was begun by ``before``."""
    if isinstance(piece, CallArguments):
        return False  # they follow the start of their call
    return isinstance(piece, CallStart) or type(piece) is not type(before)


def text_of(piece: Piece) -> str:
    return "" if isinstance(piece, CallStart) else piece.text


def _shown(first: Piece, text: str) -> dict[str, Any]:
    match first:
        case Content():
            return {"type": "text", "text": text}
        case Reasoning():
            return {"type": "thinking", "thinking": text, "signature": ""}
        case CallStart():
            return {"type": "tool_use", "id": first.id, "name": first.name, "input": _object(text)}
        case CallArguments():
            raise AssertionError("the arguments of no call")


def _object(text: str) -> msgspec.Raw | dict[str, str]:
    """The arguments of a call, as the model wrote them. Those that are cut, no JSON object, or too deep to be read are
    shown as Anthropic advises to show them."""
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": text}
    return msgspec.Raw((text or "{}").encode())
