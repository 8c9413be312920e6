"""From messages of blocks to the messages of a chat. Nothing here knows requests or the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from firsttoken.server.decode import check_size, decode_json, is_absent
from firsttoken.server.errors import bad_request
from firsttoken.server.messages.schema import (
    Block,
    CacheControl,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from firsttoken.server.refusals import refuse_unimplemented, refused_fields

MESSAGES = "messages"
FAILED = "Error: "
"""What the result of a tool that failed begins with: templates have no other word for it."""
BETWEEN_TURNS = "\n\n"
"""What stands between turns of the user that follow each other: they are one turn."""

_MESSAGES = msgspec.json.Decoder(list[InputMessage])
_REFUSED = {kind: refused_fields(kind) for kind in (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)}
_SAYS: dict[str, tuple[type[Block], ...]] = {
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
}


def decode_turns(raw: msgspec.Raw, limit: int, max_messages: int) -> list[InputMessage]:
    """The conversation. Raises `ApiError` 400 that names the place."""
    if is_absent(raw):
        raise bad_request("messages is required: a list of {role, content}", MESSAGES, "missing_parameter")
    check_size(raw, limit, MESSAGES)
    turns = decode_json(_MESSAGES, raw, MESSAGES)
    if not turns:
        raise bad_request("messages is empty: send at least one message", MESSAGES, "empty_messages")
    if len(turns) > max_messages:
        raise bad_request(f"messages holds {len(turns)} messages; at most {max_messages}", MESSAGES)
    for index, turn in enumerate(turns):
        if not isinstance(turn.content, str):
            _check(turn.content, turn.role, f"{MESSAGES}[{index}].content")
    return turns


def _check(blocks: Sequence[Block], role: str, path: str) -> None:
    if not blocks:
        raise bad_request(f"{path} is empty: send text, or at least one block", path)
    for index, block in enumerate(blocks):
        if not isinstance(block, _SAYS[role]):
            known = " and ".join(str(kind.__struct_config__.tag) for kind in _SAYS[role])
            where = f"{path}[{index}].type"
            raise bad_request(
                f"{where} {block.__struct_config__.tag!r} is not the {role}'s to send: supported are {known}", where
            )
        refuse_unimplemented(block, _REFUSED[type(block)], f"{path}[{index}].")
        if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
            check_texts(block.content or (), f"{path}[{index}].content")


def check_texts(blocks: Sequence[TextBlock], path: str) -> None:
    """Raises `ApiError` 400 for what is known of text, and not implemented."""
    for index, block in enumerate(blocks):
        refuse_unimplemented(block, _REFUSED[TextBlock], f"{path}[{index}].")


def to_messages(turns: Sequence[InputMessage], system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    """The conversation as chat has it: results of tools are messages of their own, in the order in which they came.

    Raises `ApiError` 400: a result of a tool that nobody used.
    """
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": _text(system)})
    used: set[str] = set()
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            chat.append(_assistants(turn.content))
            used.update(call["id"] for call in chat[-1].get("tool_calls", ()))
        elif turn.role == "system":
            chat.append({"role": "system", "content": _joined(turn.content)})
        else:
            _check_results(turn.content, used, f"{MESSAGES}[{index}].content")
            _add_users(chat, turn.content)
    return chat


def _assistants(content: str | Sequence[Block]) -> dict[str, Any]:
    """What was thought, said and called in one go."""
    message: dict[str, Any] = {"role": "assistant", "content": _joined(content)}
    if isinstance(content, str):
        return message
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in content
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _check_results(content: str | Sequence[Block], used: set[str], path: str) -> None:
    for index, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in used:
            where = f"{path}[{index}].tool_use_id"
            raise bad_request(
                f"{where} {block.tool_use_id!r:.80} is that of no tool_use before it: send the assistant's message too",
                where,
            )


def _add_users(chat: list[dict[str, Any]], content: str | Sequence[Block]) -> None:
    between = BETWEEN_TURNS
    for said in _users(content):
        if chat and said["role"] == chat[-1]["role"] == "user":
            chat[-1]["content"] += between + said["content"]
        else:
            chat.append(said)
        between = ""


def _users(content: str | Sequence[Block]) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    for block in content:
        if isinstance(block, TextBlock):
            yield {"role": "user", "content": block.text}
        elif isinstance(block, ToolResultBlock):
            result = (FAILED if block.is_error else "") + _text(block.content or "")
            yield {"role": "tool", "content": result, "tool_call_id": block.tool_use_id}


def _joined(content: str | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    return _text([block for block in content if isinstance(block, TextBlock)])


def _text(content: str | Sequence[TextBlock]) -> str:
    """Blocks are joined without anything between, as parts are in chat."""
    return content if isinstance(content, str) else "".join([block.text for block in content])


def cache_controls(turns: Sequence[InputMessage], system: str | Sequence[TextBlock] | None) -> Iterator[CacheControl]:
    """Those of all blocks that have one."""
    for content in (system, *(turn.content for turn in turns)):
        for block in () if content is None or isinstance(content, str) else content:
            control = None if isinstance(block, ThinkingBlock) else block.cache_control
            if control is not None:
                yield control
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str | None):
                yield from (inner.cache_control for inner in block.content if inner.cache_control is not None)
