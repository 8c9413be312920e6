"""Options that say what an answer must look like."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from firsttoken.core.errors import ConfigError, InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.structured_outputs import choice_grammar, schema_grammar


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what an answer must look like, one of").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE|JSON", help="a document that fits this JSON schema")
    group.add_argument("--regex", metavar="PATTERN", help="a text that this regular expression matches as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts (may be repeated)")
    group.add_argument(
        "--grammar", type=Path, metavar="FILE", help="a text of this Lark grammar (llguidance's dialect)"
    )


def grammar_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The field of `SamplingParams`, if one of them was given. Compiled without a model, in milliseconds, so that one
    that cannot be used is known before a model is loaded. Raises `ConfigError`."""
    flag, grammar = _given(options)
    if grammar is None:
        return {}
    from firsttoken.grammar.source import check

    try:
        check(grammar)
    except InvalidRequest as error:
        raise ConfigError(f"{flag}: {error.message}") from None
    return {"grammar": grammar}


def _given(options: argparse.Namespace) -> tuple[str, Grammar | None]:
    flag = "--json-schema"
    try:
        if options.json_schema is not None:
            given = options.json_schema
            return flag, schema_grammar(given if given.lstrip().startswith("{") else _read(flag, Path(given)))
        if options.regex is not None:
            flag = "--regex"
            return flag, Grammar("regex", options.regex)
        if options.choice is not None:
            flag = "--choice"
            return flag, choice_grammar(options.choice)
        if options.grammar is not None:
            flag = "--grammar"
            return flag, Grammar("lark", _read(flag, options.grammar))
    except InvalidRequest as error:
        raise ConfigError(f"{flag}: {error.message}") from None
    return "", None


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}: {path} is not UTF-8") from None
