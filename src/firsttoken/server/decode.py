"""From body bytes to a request struct; whatever is wrong becomes a 400 that names the place."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.meant import meant
from firsttoken.server.body_values import check_values
from firsttoken.server.errors import ApiError, bad_request
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.schema import Number

# Parsing more than this takes long enough (about 0.1 ms) to be worth a thread.
INLINE_BYTES = 64 * 1024
MAX_TOKEN_ID = 2**32 - 1

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_SURROGATE = re.compile(
    rb"\\\\|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_PATH = re.compile(r" - at `(key in )?\$\.?(.*?)`$")
_TYPES = re.compile(r"Expected `(.*?)`, got `(.*?)`$")
_NAMES = {
    "array": "an array",
    "bool": "a boolean",
    "float": "a number",
    "int": "a number",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
# A longer one resembles nothing, and comparing takes time.
_LONGEST_NAME = 64
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)


class RequestDecoder(Generic[S]):
    """Decodes one kind of request, and refuses what we would otherwise ignore."""

    def __init__(self, struct: type[S], elsewhere: Mapping[str, str] | None = None, *, ids: str = "") -> None:
        """``elsewhere``: fields of another route, each with what to tell a caller who sends it here. ``ids`` is the
        field that may hold token ids, if there is one."""
        self._elsewhere = elsewhere or {}
        self._ids = ids
        self._decoder = msgspec.json.Decoder(struct)
        self._refused = refused_fields(struct)
        fields = msgspec.structs.fields(struct)
        self._known = [field.encode_name for field in fields if field.name not in self._refused]

    def decode(self, body: bytes) -> S:
        """Raises `ApiError` 400: not JSON, a wrong type, an unknown field, a field we do not implement, too many
        values."""
        check_values(body, self._ids)
        request = decode_json(self._decoder, body, elsewhere=self._elsewhere, known=self._known)
        refuse_unimplemented(request, self._refused)
        return request


def decode_json(
    decoder: msgspec.json.Decoder[T],
    data: bytes | msgspec.Raw,
    at: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    known: Collection[str] = (),
) -> T:
    """Decode a whole body, or the raw field ``at`` of one; raises `ApiError` 400 naming the place, and the one of
    ``known`` fields that a misspelt one resembles."""
    try:
        return decoder.decode(data)
    except RecursionError:
        raise bad_request("the JSON is nested too deeply", at or None, "invalid_json") from None
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), at, elsewhere, known) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _not_json(bytes(data), str(error), at) from None


def as_type(value: Any, wanted: type[T], at: str) -> T:
    """The field ``at`` of a body, decoded as plain JSON, as what it should be; raises `ApiError` 400 naming the
    place."""
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), at, MappingProxyType({})) from None


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """Run ``work(*args)`` here when its input is small, else in a thread."""
    if size <= INLINE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def _wrong_value(message: str, at: str, elsewhere: Mapping[str, str], known: Collection[str] = ()) -> ApiError:
    unknown = _UNKNOWN.search(message)
    path = _PATH.search(message)
    inner = path.group(2).replace("[...]", "") if path else ""
    place = at + (inner if inner.startswith("[") or not at or not inner else f".{inner}")
    message = _PATH.sub("", message)
    if unknown:
        name = f"{place}.{unknown.group(1)}" if place else unknown.group(1)
        guess = "" if place or len(name) > _LONGEST_NAME else meant(name, known)
        advice = elsewhere.get(name, f"it is not supported; leave it out{guess}")
        return bad_request(f"unknown field {name!r}: {advice}", name, "unknown_parameter")
    subject = place or "the body"
    if path and path.group(1):
        subject = f"a key of {subject}"
    elif path and path.group(2).endswith("[...]"):
        subject = f"a value of {subject}"
    return bad_request(f"{subject} {_plain(message)}", place or None, "invalid_type")


def _plain(message: str) -> str:
    """What msgspec found wrong with a value, as the end of a sentence: "must be an array, got a string"."""
    types = _TYPES.match(message)
    if types is None:
        return f"is not accepted: {message[:1].lower()}{message[1:]}"
    # Null means "left out" everywhere, so nobody is told to send it.
    wanted = dict.fromkeys(_NAMES.get(one, one) for one in types.group(1).split(" | ") if one != "null")
    return f"must be {' or '.join(wanted)}, got {_NAMES.get(types.group(2), types.group(2))}"


def _not_json(data: bytes, message: str, at: str) -> ApiError:
    for match in _SURROGATE.finditer(data):
        if match.group(2):
            half = match.group(2).decode()
            text = f"the text holds half a surrogate pair ({half} at byte {match.start()}), which is not a character"
            return bad_request(text, at or None, "invalid_unicode")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = f"the body is not valid UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
        return bad_request(text, at or None, "invalid_unicode")
    if not data.strip():
        return bad_request("the body is empty: send a JSON object", at or None, "invalid_json")
    return bad_request(f"the body is not valid JSON: {message}", at or None, "invalid_json")


# ------------------------------------------------------------------ prompts and messages

_MESSAGES = msgspec.json.Decoder(list[dict[str, Any]])
_STRING = msgspec.json.Decoder(str)
_IDS: msgspec.json.Decoder[Sequence[Number]] = msgspec.json.Decoder(list[Number])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])

Prompt = str | array  # type: ignore[type-arg]  # array[int] cannot be subscripted at run time
BATCH_SHARE = 8


def is_absent(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")


def check_size(raw: msgspec.Raw, limit: int, name: str) -> None:
    """Refuse a prompt that cannot fit the model, before anything is built from it."""
    size = len(memoryview(raw))
    if size > limit:
        raise bad_request(
            f"{name} takes {size} bytes of JSON, more than this model's context can hold ({limit} at most); shorten it",
            name,
            "context_length_exceeded",
        )


def decode_messages(raw: msgspec.Raw, limit: int, max_messages: int) -> list[dict[str, Any]]:
    """The conversation as plain dicts. Raises `ApiError` 400: absent, empty, too long, not a list of objects."""
    if is_absent(raw):
        raise bad_request("messages is required: a list of {role, content}", "messages", "missing_parameter")
    check_size(raw, limit, "messages")
    messages = decode_json(_MESSAGES, raw, "messages")
    if not messages:
        raise bad_request("messages is empty: send at least one message", "messages", "empty_messages")
    if len(messages) > max_messages:
        raise bad_request(f"messages holds {len(messages)} messages; at most {max_messages}", "messages")
    return messages


def decode_prompts(raw: msgspec.Raw, limit: int, max_prompts: int, *, name: str = "prompt") -> list[Prompt]:
    """One entry a prompt: text, or token ids as ``array('I')``. ``name`` is the field. Raises `ApiError` 400."""
    if is_absent(raw):
        raise bad_request(f"{name} is required: text or token ids, or a list of either", name, "missing_parameter")
    data = bytes(raw).strip()
    inner = data[1:].lstrip()[:1] if data.startswith(b"[") else b""
    if inner not in (b'"', b"["):
        check_size(raw, limit, name)
        return [_prompt(raw, name, limit)]
    return [
        _prompt(one, f"{name}[{index}]", limit) for index, one in enumerate(_several(raw, limit, max_prompts, name))
    ]


def decode_texts(raw: msgspec.Raw, limit: int, most: int, *, name: str) -> list[str]:
    """A text, or a list of texts; ``name`` is the field. Raises `ApiError` 400."""
    if is_absent(raw):
        raise bad_request(f"{name} is required: a text, or a list of texts", name, "missing_parameter")
    if not bytes(raw).lstrip().startswith(b"["):
        return [decode_text(raw, name, limit)]
    return [decode_text(one, f"{name}[{index}]", limit) for index, one in enumerate(_several(raw, limit, most, name))]


def _several(raw: msgspec.Raw, limit: int, most: int, name: str) -> list[msgspec.Raw]:
    check_size(raw, BATCH_SHARE * limit, name)
    raws = decode_json(_RAWS, raw, name)
    if len(raws) > most:
        raise bad_request(
            f"{name} holds {len(raws)} {'prompts' if name == 'prompt' else 'texts'}; at most {most}", name
        )
    return raws


def decode_ids(raw: msgspec.Raw, name: str, limit: int) -> array[int]:
    """Token ids as ``array('I')``; raises `ApiError` 400 for anything else."""
    check_size(raw, limit, name)
    return as_ids(decode_json(_IDS, raw, name), name)


def decode_text(raw: msgspec.Raw, name: str, limit: int) -> str:
    check_size(raw, limit, name)
    return decode_json(_STRING, raw, name)


def _prompt(raw: msgspec.Raw, name: str, limit: int) -> Prompt:
    first = bytes(raw).lstrip()[:1]
    if first == b'"':
        return decode_text(raw, name, limit)
    if first == b"[":
        return decode_ids(raw, name, limit)
    raise bad_request(f"{name} must be text or a list of token ids", name, "invalid_type")


def as_ids(ids: Sequence[Number], name: str) -> array[int]:
    """Whole numbers that fit 32 bits; whether the model has them is the front end's question."""
    try:
        return array("I", ids)  # type: ignore[arg-type]  # floats raise TypeError here, and are looked at below
    except (TypeError, OverflowError):
        pass
    whole = array("I")
    for index, token in enumerate(ids):
        if token != int(token) or not 0 <= token <= MAX_TOKEN_ID:
            raise bad_request(f"{name}[{index}]: {token!r} is not a token id", name)
        whole.append(int(token))
    return whole


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Template variables of the caller. Raises `InvalidRequest` for those that are ours, or a whole template."""
    for name in kwargs or ():
        if name in _RESERVED_KWARGS:
            field = f"chat_template_kwargs.{name}"
            raise InvalidRequest(
                f"{field} is not supported: the template and its inputs are the server's",
                param=field,
                code="unsupported_parameter",
            )
    return dict(kwargs or {})


_RESERVED_KWARGS = frozenset(
    {
        "chat_template",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "cache_salt",
        "continue_final_message",
        "tokenize",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "self",
    }
)
