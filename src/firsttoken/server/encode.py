"""Answers as bytes, in OpenAI's shapes. A chunk is a prefix made once per request and the encoded delta."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from firsttoken.core.plan import TokenLogprobs

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta
    from firsttoken.text.tokenizer import Tokenizer

# Non-finite numbers become null: what leaves here is always JSON.
to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
# JSON has no infinity: an impossible token gets this floor, as OpenAI does.
LOGPROB_FLOOR = -9999.0
# A token and its log-probabilities, or none of them.
Told = tuple[int, TokenLogprobs]
MaybeTold = tuple[int, TokenLogprobs | None]


def in_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of ``value``, in which an iterator stands for a list: its items are made and encoded as their pieces are
    taken, so that of a long one no more than an item is held at a time."""
    lists: list[Iterator[Any]] = []

    def leave_out(one: Any) -> msgspec.Raw:
        if not isinstance(one, Iterator):
            raise TypeError(f"{type(one).__name__} is nothing that an answer can hold")
        lists.append(one)
        return msgspec.Raw(b"\0")  # a byte that is nowhere else in JSON

    first, *rest = msgspec.json.Encoder(enc_hook=leave_out).encode(value).split(b"\0")
    yield first
    for items, after in zip(lists, rest, strict=True):
        before = b"["
        for item in items:
            yield before + to_json(item)
            before = b","
        yield (b"[]" if before == b"[" else b"]") + after


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """``reasoning_tokens`` of the completion's: None for a model that does not reason."""
    used: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        used["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return used


class ChunkWriter:
    """The server-sent events of one streaming answer; ``kind`` is OpenAI's ``object``, ``text_choice`` encodes a choice
    with an index and an encoded text."""

    def __init__(
        self,
        *,
        id_: str,
        kind: str,
        created: int,
        model: str,
        service_tier: str,
        text_choice: Callable[[int, bytes], bytes],
        usage_last: bool = False,
        usage_always: bool = False,
    ) -> None:
        self._text_choice = text_choice
        fixed = to_json({"id": id_, "object": kind, "created": created, "model": model, "service_tier": service_tier})
        self._head = b"data: " + fixed[:-1] + b',"choices":['
        self._usage_last = usage_last
        self.usage_always = usage_always and usage_last
        # With include_usage every chunk has the key, and only the last one a value.
        self._tail = b'],"usage":null}\n\n' if usage_last else b"]}\n\n"

    def event(self, choice: bytes, used: dict[str, Any] | None = None, timings: dict[str, Any] | None = None) -> bytes:
        """One chunk with one encoded choice. ``used`` is the usage so far, given when ``usage_always``; ``timings``
        is for the chunk that ends the last answer, and is left to `last` when a usage chunk follows."""
        if timings is not None and not self._usage_last:
            return self._head + choice + b'],"timings":' + to_json(timings) + b"}\n\n"
        if used is not None:
            return self._head + choice + b'],"usage":' + to_json(used) + b"}\n\n"
        return self._head + choice + self._tail

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the encoded text in a chunk with nothing else in it, which nearly all chunks
        are, of the choice ``index``; not for ``usage_always``."""
        before, _, after = self.event(self._text_choice(index, b"\0")).partition(b"\0")
        return before, after

    def last(self, used: dict[str, Any], timings: dict[str, Any] | None) -> bytes:
        """What follows the last delta: the usage where asked for, with the timings on it, and the end mark."""
        if not self._usage_last:
            return DONE
        extra = b'],"usage":' + to_json(used)
        if timings is not None:
            extra += b',"timings":' + to_json(timings)
        return self._head + extra + b"}\n\n" + DONE


def chat_choice(
    index: int, delta: bytes, finish: bytes = b"null", logprobs: bytes = b"null", more: bytes = b""
) -> bytes:
    """An encoded choice of a chat chunk; ``more`` starts with a comma."""
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, finish, more)


def chat_text_choice(index: int, text: bytes) -> bytes:
    """An encoded choice of a chat chunk that brings text."""
    return chat_choice(index, b'{"content":' + text + b"}")


def text_choice(
    index: int, text: bytes, finish: bytes = b"null", logprobs: bytes = b"null", more: bytes = b""
) -> bytes:
    """An encoded choice of a completion chunk."""
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, text, logprobs, finish, more)


def token_ids_extra(delta: Delta, prompt: array[int] | None) -> bytes:
    """``return_token_ids``: the delta's ids, and with the first chunk the prompt's."""
    extra = b',"token_ids":' + to_json(delta.token_ids)
    return extra if prompt is None else extra + b',"prompt_token_ids":' + to_json(prompt.tolist())


def stop_extra(delta: Delta) -> bytes:
    """vLLM's ``stop_reason``: the stop string or token id that ended the answer, or null."""
    return b',"stop_reason":' + to_json(delta.stop_reason)


# ------------------------------------------------------------------ log-probabilities


def told_of(delta: Delta) -> Iterator[Told]:
    """The tokens of a delta with what is told of each."""
    return zip(delta.token_ids, delta.logprobs or (), strict=True)


class TokenNames:
    """Token ids as the text and bytes that log-probabilities show. Without a tokenizer a token is "token_id:N"."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def raw(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if self._tokenizer is not None else b"token_id:%d" % token

    def chat(self, found: Iterable[Told], top: int) -> Iterator[dict[str, Any]]:
        """Entries of ``logprobs.content``, one a token."""
        for token, one in found:
            entry = self._chat_entry(token, one.logprob)
            pairs = list(zip(one.top_ids, one.top_logprobs, strict=True))[:top]
            entry["top_logprobs"] = [self._chat_entry(other, value) for other, value in pairs]
            yield entry

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.raw(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": floor(logprob), "bytes": list(raw)}

    def legacy(
        self, found: Callable[[], Iterable[MaybeTold]], top: int, offsets: Iterator[int]
    ) -> dict[str, Iterator[Any]]:
        """The four parallel lists of completions, for each of which ``found`` gives the tokens once; ``offsets`` are
        theirs. A token without log-probabilities, the first of a prompt, has null."""
        return {
            "tokens": (self._legacy_name(token) for token, _ in found()),
            "token_logprobs": (None if one is None else floor(one.logprob) for _, one in found()),
            "top_logprobs": (None if one is None else self._legacy_top(token, one, top) for token, one in found()),
            "text_offset": offsets,
        }

    def offsets(self, token_ids: Iterable[int], offset: int) -> Iterator[int]:
        """Where each token's text begins, in characters, if the first one's begins at ``offset``."""
        for token in token_ids:
            yield offset
            offset += len(self.raw(token).decode("utf-8", "ignore"))

    def _legacy_top(self, token: int, found: TokenLogprobs, top: int) -> dict[str, float]:
        pairs = list(zip(found.top_ids, found.top_logprobs, strict=True))[:top]
        named = {self._legacy_name(other): floor(value) for other, value in pairs}
        named.setdefault(self._legacy_name(token), floor(found.logprob))
        return named

    def _legacy_name(self, token: int) -> str:
        # A piece of a character has no text of its own: its bytes are spelt out, so that two pieces differ.
        raw = self.raw(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def floor(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR) if math.isfinite(logprob) else LOGPROB_FLOOR
