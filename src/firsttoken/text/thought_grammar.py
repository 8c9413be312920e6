"""Grammars, in llguidance's dialect of Lark, of answers that may begin with reasoning: it is thought first, and the
grammar holds for what follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.core.grammar import Grammar
from firsttoken.text.reasoning import ReasoningFormat, Thinks

ANY_TEXT = r"/(.|\n)*/"
# A grammar that lets blanks stand anywhere lets a model fill its answer with them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Control = Callable[[str], int | None]
"""The id of a control token; None for a text that is none. As text one could not be written."""


@dataclass(frozen=True, slots=True)
class Thought:
    """``start`` is what stands before all else in a grammar's first rule, ``rules`` are the rules that it needs.
    ``mark`` is the character with which reasoning begins that is opened by text."""

    start: str = ""
    rules: tuple[str, ...] = ()
    mark: str = ""

    @classmethod
    def of(cls, form: ReasoningFormat | None, thinks: Thinks, control: Control) -> Thought:
        if form is None or thinks == "no":
            return cls()
        closing = control(form.closing)
        if closing is None:
            rules: tuple[str, ...] = (f"thought[suffix={json.dumps(form.closing)}]: {ANY_TEXT}",)
        else:
            rules = (f"thought: thought_text <[{closing}]>", f"thought_text: {ANY_TEXT}")
        rules = (*rules, r"thought_blank: /\n{0,2}/")
        if thinks == "on":
            return cls("thought thought_blank ", rules)
        opening = control(form.opening)
        start = json.dumps(form.opening) if opening is None else f"<[{opening}]>"
        return cls(f"({start} thought thought_blank)? ", rules, "" if opening is not None else form.opening[0])


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Any value that keeps to ``schema``, with the blanks that models write and no others."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)


def after_thought(grammar: Grammar, thought: Thought) -> Grammar | None:
    """``grammar`` for what follows the thought; None where it cannot be said of a part of an answer."""
    if not thought.rules:
        return grammar
    if grammar.kind == "json_object":
        body = json_rule({"type": "object"})
    elif grammar.kind == "json_schema":
        body = json_rule(json.loads(grammar.source))
    elif grammar.kind == "choice":
        body = "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.source)) + ")"
    elif grammar.kind == "regex":
        body = "/" + grammar.source.replace("/", r"\/") + "/"
    else:
        return None
    return Grammar("lark", "\n".join([f"start: {thought.start}answer", f"answer: {body}", *thought.rules]) + "\n")
