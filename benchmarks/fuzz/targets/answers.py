"""What a model says, read as thought, content and tool calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from benchmarks.fuzz.pieces import Pieces
from firsttoken.text.pieces import CallArguments, CallStart, Content, Reader, Reasoning
from firsttoken.text.reasoning import REASONING_FORMATS, ReasoningReader
from firsttoken.text.tools.formats import FORMATS
from firsttoken.text.tools.reader import Offer, ToolReader

_FORMS = sorted(FORMATS)
_THOUGHTS = sorted(REASONING_FORMATS)
_SCHEMAS = {
    "f": {},
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
}
# What calls are written with, in all forms, and what breaks them.
_WORDS = (
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "}",
        "{",
        "[TOOL_CALLS]",
        "f",
        "[ARGS]",
    ),
    *(
        "<|python_tag|>",
        "<function=f>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        ";",
        "[",
        "]",
        '"',
        "\\",
        " ",
    ),
    *(
        "<think>",
        "</think>",
        "\n",
        "get_weather",
        '{"city": "T\u014dky\u014d"}',
        '"parameters"',
        ":",
        ",",
        "null",
        "1e400",
    ),
    *(
        "\\u00e9",
        "\\ud800",
        "\U0001f525",
        "<",
        "</",
        "<tool",
        "nan",
        "-",
        "true",
        '"arguments": "{}"',
        '{"type": "function"',
    ),
)


def _text(pieces: Pieces) -> str:
    found = []
    for _ in range(pieces.below(24)):
        pick = pieces.byte()
        found.append(_WORDS[pick % len(_WORDS)] if pick < 224 else pieces.text())
    return "".join(found)


def tools(data: bytes) -> None:
    """Any text in any pieces says the same; calls are of tools that were offered, and no word is lost without one."""
    pieces = Pieces(data)
    form, options = _FORMS[pieces.below(len(_FORMS))], pieces.byte()
    cuts = [1 + pieces.below(9) for _ in range(pieces.below(12))]
    text = _text(pieces)
    whole = _heard(_reader(form, options), [text])
    parts, at = [], 0
    for size in cuts:
        parts.append(text[at : at + size])
        at += size
    found = _heard(_reader(form, options), [*parts, text[at:]])
    assert found == whole, f"{found} is not {whole}"
    assert _heard(_reader(form, options), text) == whole
    content, thought, calls = whole
    assert all(name in _SCHEMAS for name, _ in calls)
    if not options & 2:
        assert len(calls) <= 1
    if not calls and not thought and not options & 5:
        assert content == text, f"{content!r} is left of {text!r}"


def _reader(form: str, options: int) -> Reader:
    """``options``: 1, marks are hidden; 2, several calls may be made; 4, there may be thought; 8, it has begun."""
    numbers = itertools.count()
    shape = FORMATS[form]
    hidden = frozenset(shape.markers) if options & 1 else frozenset[str]()
    offer = Offer(_SCHEMAS, parallel=bool(options & 2))
    made = ToolReader(shape, offer, hidden=hidden, new_id=lambda: f"id{next(numbers)}")
    if not options & 4:
        return made
    return ReasoningReader(REASONING_FORMATS[_THOUGHTS[options % len(_THOUGHTS)]], made, inside=bool(options & 8))


def _heard(reader: Reader, parts: Iterable[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thought, and each call's name and arguments."""
    content, thought = "", ""
    calls: list[tuple[str, str]] = []
    told = [piece for part in parts for piece in reader.push(part)]
    for piece in [*told, *reader.finish()]:
        match piece:
            case Content(text):
                assert text, "a piece says nothing"
                content += text
            case Reasoning(text):
                thought += text
            case CallStart(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, thought, calls
