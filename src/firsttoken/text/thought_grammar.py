"""Grammars, in llguidance's dialect of Lark, of answers that may begin with reasoning: it is thought first, and the
grammar holds for what follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.core.grammar import Grammar
from firsttoken.text.reasoning import ReasoningFormat, Thinks

ANY_TEXT = r"/(.|\n)*/"
# A grammar that lets blanks stand anywhere lets a model fill its answer with them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# In a regular expression between slashes: those of its own, but not what is escaped already, and no line's end.
_SLASHES = re.compile(r"\\.|/|\n", re.DOTALL)
_AS_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


@dataclass(frozen=True, slots=True)
class Thought:
    """``start`` is what stands before all else in a grammar's first rule, ``rules`` are the rules that it needs.
    ``mark`` is the character with which reasoning begins that may come or not."""

    start: str = ""
    rules: tuple[str, ...] = ()
    mark: str = ""

    @classmethod
    def of(cls, form: ReasoningFormat | None, thinks: Thinks) -> Thought:
        if form is None or thinks == "no":
            return cls()
        rules = (f"thought[suffix={json.dumps(form.closing)}]: {ANY_TEXT}", r"thought_blank: /\n{0,2}/")
        if thinks == "on":
            return cls("thought thought_blank ", rules)
        return cls(f"({json.dumps(form.opening)} thought thought_blank)? ", rules, form.opening[0])


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Any value that keeps to ``schema``, with the blanks that models write and no others."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)


def rule_of(grammar: Grammar) -> str | None:
    """What stands for ``grammar`` inside of another; None for one that cannot be a part."""
    match grammar.kind:
        case "json_object":
            return json_rule({"type": "object"})
        case "json_schema":
            return json_rule(json.loads(grammar.source))
        case "choice":
            return "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.source)) + ")"
        case "regex":
            return "/" + _SLASHES.sub(lambda found: _AS_LARK.get(found[0], found[0]), grammar.source) + "/"
        case _:
            return None


def lark(start: str, rules: list[str], thought: Thought) -> Grammar:
    return Grammar("lark", "\n".join([f"start: {thought.start}{start}", *rules, *thought.rules]) + "\n")
