"""Tokens to text, stop strings in it, and the messages of a conversation."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from benchmarks.fuzz.pieces import Pieces
from firsttoken.core.errors import InvalidRequest
from firsttoken.server.decode import decode_messages
from firsttoken.server.errors import ApiError, as_api_error
from firsttoken.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from firsttoken.text.messages import normalize_messages
from firsttoken.text.stop import StopHit, StopScanner

# A token for each byte, and some that hold pieces of characters.
_TOKENS = [bytes((byte,)) for byte in range(256)]
_MORE = (b"\xf0\x9f", b"\x94\xa5", b"\xc4", b" the", b"\xe2\x80", b"\x8b\xe2", b"", b"\xef\xbf\xbd")
TABLE = dict(enumerate([*_TOKENS, *_MORE]))


def detokenizer(data: bytes) -> None:
    """Any ids in any pieces give the text of the whole, and never half a character."""
    pieces = Pieces(data)
    kind, cuts = pieces.below(3), pieces.below(8)
    sizes = [pieces.below(6) for _ in range(cuts)]
    ids = [byte if byte < 240 else 240 + (byte - 240) * 2 % len(_MORE) + 16 for byte in pieces.rest()]
    whole = _decode(ids)
    made: Detokenizer
    if kind == 0:
        made = WindowDetokenizer(_decode)
    else:
        made = ByteDetokenizer(TABLE, strip_start=kind == 2)
        whole = whole.removeprefix(" ") if kind == 2 else whole
    shown, at = [], 0
    for size in sizes:
        shown.append(made.push(ids[at : at + size]) if size else "")
        at += size
    shown += [made.push([token]) for token in ids[at:]]
    shown.append(made.finish())
    for piece in shown:
        piece.encode("utf-8")  # raises at half a surrogate pair
    assert "".join(shown) == whole, f"{shown} is not {whole!r}"


def _decode(ids: list[int]) -> str:
    return b"".join(TABLE[token] for token in ids).decode("utf-8", "replace")


_LETTERS = "ab\né"


def stop_strings(data: bytes) -> None:
    """As if the text came character by character and were searched from its beginning each time."""
    pieces = Pieces(data)
    include = bool(pieces.below(2))
    stops = tuple(_letters(pieces.take(1 + pieces.below(6))) or "a" for _ in range(1 + pieces.below(4)))
    cuts = [1 + pieces.below(5) for _ in range(pieces.below(8))]
    text = _letters(pieces.rest())
    scanner = StopScanner(stops, include)
    shown, hit, at = "", None, 0
    for size in [*cuts, *[1] * len(text)]:
        if at >= len(text):
            break
        found = scanner.push(text[at : at + size])
        at += size
        if isinstance(found, StopHit):
            shown, hit = shown + found.text, found.stop
            break
        shown += found
        assert text.startswith(shown), f"{shown!r} was shown of {text!r}"
    else:
        shown += scanner.finish()
    if hit is None and at >= len(text):
        shown += scanner.finish()
    assert (shown, hit) == _searched(text, stops, include), f"{shown!r} and {hit!r} for {stops} in {text!r}"


def _searched(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def _letters(raw: bytes) -> str:
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in raw)


_WORDS = (
    *("role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "tool_call_id"),
    *("user", "assistant", "system", "tool", "developer", "reasoning_content", "refusal", "image_url", "{}", "boom"),
)


def messages(data: bytes) -> None:
    """Well-formed messages, or a refusal that is short and valid JSON. The first byte says whether the others are
    JSON as they are, or what JSON is made of."""
    pieces = Pieces(data)
    raw = data[1:] if pieces.below(4) == 0 else json.dumps(_conversation(pieces)).encode()
    try:
        found = decode_messages(msgspec.Raw(raw), 4096, 16)
        plain = normalize_messages(found, developer=len(data) % 2 == 0)
    except (ApiError, InvalidRequest) as error:
        check_refusal(error)
        return
    for message in plain:
        assert isinstance(message["content"], str)
        assert isinstance(message["role"], str)
    json.dumps(plain, ensure_ascii=False).encode("utf-8")


def _conversation(pieces: Pieces) -> Any:
    if pieces.below(8) == 0:
        return pieces.value(_WORDS)
    found = []
    for _ in range(pieces.below(4)):
        message = pieces.object(_WORDS)
        if pieces.below(4):
            message["role"] = ("user", "assistant", "tool", "system")[pieces.below(4)]
        if pieces.below(2):
            message.setdefault("content", pieces.text())
        found.append(message)
    return found


def check_refusal(error: Exception) -> None:
    """A 4xx in OpenAI's shape, and no longer than that of one."""
    refused = as_api_error(error)
    assert 400 <= refused.status < 500, refused.message
    body = refused.body()
    assert len(body) < 10_000
    told = json.loads(body.decode("utf-8"))["error"]
    assert told["message"]
    assert set(told) == {"message", "type", "param", "code"}
