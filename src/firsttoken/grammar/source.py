"""From a `Grammar` to llguidance's own form, and what is refused of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from json import JSONDecoder
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.grammar.closing import Ends
from firsttoken.grammar.examples import example

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# What one grammar may cost: some 20 ms to build, 20 ms a mask, and 40 MB. (Its defaults allow 500 MB.)
LIMITS = LLParserLimits(
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    verbose_errors=False,
)
# One blank after commas and colons, none elsewhere: what a model writes by habit, and nothing that could go on for
# ever. These win over what a schema's own "x-guidance" says, which could have keywords ignored.
_JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}
_SUFFIX = re.compile(r'\[suffix=("(?:[^"\\\n]|\\[\\"n])*")\]')
_JSON = re.compile(r"%json\s*(?=\{)")
_REGEX = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
_MOST_TEXTS = 32
# Of formats whose ends a walk byte by byte does not find soon.
_FORMATS = {"email": "a@b.cd", "uri": "http://a.bc", "duration": "P1D"}
_UNKNOWN = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_MAX_MESSAGE = 400
MAX_CHOICES = 4096


def to_llguidance(grammar: Grammar) -> str:
    """Raises `InvalidRequest` for a source that cannot be read; what it says is checked when it is compiled."""
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=_JSON_OPTIONS)
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(grammar.source, overrides=_JSON_OPTIONS)
            except ValueError as error:
                raise _refused(grammar, str(error)) from None
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(_literal(text) for text in choices_of(grammar)))
        case _:
            if "::=" in grammar.source:
                raise _refused(
                    grammar, "this is GBNF (it has ::=); write it in llguidance's dialect of Lark, with a rule 'start:'"
                )
            return LLMatcher.grammar_from_lark(grammar.source)


def ends_of(grammar: Grammar) -> Ends:
    """The texts with which a Lark grammar says that free stretches end, and those that match the grammar's regular
    expressions."""
    match grammar.kind:
        case "json_schema":
            return Ends(texts=_texts(patterns_of([msgspec.json.decode(grammar.source)]), quoted=True))
        case "regex":
            return Ends(texts=_texts([grammar.source], quoted=False))
        case "lark":
            found = _SUFFIX.findall(grammar.source)
            suffixes = dict.fromkeys(msgspec.json.decode(text, type=str).encode() for text in found)
            schemas = [
                schema for at in _JSON.finditer(grammar.source) for schema in _schema_at(grammar.source, at.end())
            ]
            quoted = _texts(patterns_of(schemas), quoted=True)
            return Ends(tuple(suffixes), (*quoted, *_texts(_REGEX.findall(grammar.source), quoted=False)))
        case _:
            return Ends()


def patterns_of(schemas: Sequence[Any]) -> list[str]:
    """The regular expressions of JSON schemas, wherever they stand, and some that match what has a format; the first
    few."""
    found: dict[str, None] = {}
    left = list(schemas)
    while left and len(found) < _MOST_TEXTS:
        one = left.pop()
        if isinstance(one, dict):
            found |= {one["pattern"]: None} if isinstance(one.get("pattern"), str) else {}
            form = one.get("format")
            found |= {re.escape(_FORMATS[form]): None} if isinstance(form, str) and form in _FORMATS else {}
            named = one.get("patternProperties")
            found |= dict.fromkeys(named) if isinstance(named, dict) else {}
            left += one.values()
        elif isinstance(one, list):
            left += one
    return list(found)[:_MOST_TEXTS]


def _texts(patterns: Iterable[str], *, quoted: bool) -> tuple[bytes, ...]:
    """A text for each of which one can be told, the shortest first; ``quoted``, as it stands in a string of JSON."""
    found = {text for pattern in islice(patterns, _MOST_TEXTS) if (text := example(pattern))}
    written = [msgspec.json.encode(text)[1:-1] if quoted else text.encode("utf-8", "replace") for text in found]
    return tuple(sorted(written, key=lambda text: (len(text), text)))


def _schema_at(source: str, at: int) -> Iterator[Any]:
    """The JSON that stands there, if it is any."""
    with suppress(ValueError, RecursionError):
        yield JSONDecoder().raw_decode(source, at)[0]


def has_json(grammar: Grammar) -> bool:
    return grammar.kind in ("json_schema", "json_object") or (grammar.kind == "lark" and "%json" in grammar.source)


def choices_of(grammar: Grammar) -> list[str]:
    """The texts of a choice. Raises `InvalidRequest`."""
    try:
        texts = msgspec.json.decode(grammar.source, type=list[str])
    except msgspec.DecodeError as error:
        raise _refused(grammar, f"expected a list of texts: {error}") from None
    if not texts or not all(texts):
        raise _refused(grammar, "expected at least one text, and no empty one")
    if len(texts) > MAX_CHOICES:
        raise _refused(grammar, f"{len(texts)} texts are too many, at most {MAX_CHOICES}")
    return texts


def check(grammar: Grammar) -> None:
    """Compile it without a tokenizer, in milliseconds. Raises `InvalidRequest` that says what is wrong with it."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(to_llguidance(grammar), limits=LIMITS)
    if failed:
        raise _refused(grammar, messages[0])


def refuse(grammar: Grammar, message: str) -> InvalidRequest:
    """The refusal with the library's ``message``."""
    return _refused(grammar, message.removesuffix("<non-verbose/>").rstrip())


def _refused(grammar: Grammar, message: str) -> InvalidRequest:
    message = message.replace(". Enable 'coerce_one_of' option to approximate oneOf with anyOf", ": send anyOf")
    message = _UNKNOWN.sub(r"\1 is not supported", message)
    short = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " ..."
    return InvalidRequest(
        f"{_NAMES[grammar.kind]} cannot be used: {short}", param="grammar", code="unsupported_grammar"
    )


_NAMES = {
    "json_schema": "this JSON schema",
    "json_object": "JSON",
    "regex": "this regular expression",
    "choice": "this choice",
    "lark": "this grammar",
}
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~\-/]")


def _literal(text: str) -> str:
    """A regular expression of just this text."""
    return _META.sub(lambda found: "\\" + found[0], text)
