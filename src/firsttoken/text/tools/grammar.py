"""Calls that must be right, as a grammar in llguidance's dialect of Lark: in the model's own way of writing them, so
that what is made by the grammar is read as any other answer.

A grammar speaks of bytes. A control token in what a model writes can therefore not be part of one: a call that is
forced has it at the end of its prompt, where what follows needs none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.text.thought_grammar import ANY_TEXT, Thought, json_rule, lark, rule_of
from firsttoken.text.tools.reader import ToolFormat

Schema = Mapping[str, Any]
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties")


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """``grammar`` of what follows ``begun``, with which the answer begins and the prompt ends."""

    begun: str
    grammar: Grammar


def forced_calls(
    form: ToolFormat, schemas: Mapping[str, Schema], control: Collection[str], thought: Thought, *, parallel: bool
) -> ForcedCalls:
    """An answer that is calls of these tools and nothing else. ``control`` are the marks of ``form`` that are control
    tokens; where its calls begin with one, there can be no ``thought``. Raises `InvalidRequest` for a schema that
    cannot be kept to."""
    written = form.written
    begun, opening, before = _begun(form, schemas, control)
    after = _up_to_mark(written.after, control)
    # With a control token at the beginning or the end of each, no second call could be written.
    many = parallel and not any(mark in before + written.before + written.after for mark in control)
    closing = written.closing
    heads = {name: before + name + written.between for name in schemas}
    if begun.endswith(written.between) and written.between in control:  # all of it is in the prompt
        heads = dict.fromkeys(schemas, "")
    rules = _call_rules(form, schemas, heads, after, written.separator if many else None, opening, closing)
    return ForcedCalls(begun, lark("calls", rules, thought))


def strict_calls(
    form: ToolFormat, schemas: Mapping[str, Schema], thought: Thought, *, parallel: bool, answer: Grammar | None = None
) -> Grammar:
    """Any answer, but whatever call it has is right; with ``answer`` one that keeps to that, or calls. For a form
    whose marks are no control tokens. Raises `InvalidRequest` as `forced_calls`, and for an ``answer`` that cannot be
    told apart from calls."""
    written = form.written
    heads = {name: written.before + name + written.between for name in schemas}
    separator = written.separator if parallel else None
    if answer is not None:
        rule = rule_of(answer)
        if rule is None or form.bare:
            what = "calls that are bare JSON" if form.bare else "a Lark grammar"
            raise InvalidRequest(
                f"tools cannot be used together with a grammar for the answer, since {what} cannot be told apart from "
                "it: leave one of them out",
                param="tools",
            )
        rules = _call_rules(form, schemas, heads, written.after, separator, written.opening, written.closing)
        return lark("(calls | answer)", [f"answer: {rule}", *rules], thought)
    if form.bare:  # whatever begins with a brace is a call, and what begins as a thought does is one
        rules = _call_rules(form, schemas, heads, written.after, separator, written.opening, written.closing)
        return lark("(calls | other)", [rf"other: /([^{{\s{re.escape(thought.mark)}](.|\n)*)?/", *rules], thought)
    trigger = form.triggers[0]  # what stands before a call ends with it, so that the call goes on behind it
    opening = written.opening.removeprefix(trigger)
    heads = heads if written.opening else {name: head.removeprefix(trigger) for name, head in heads.items()}
    separator = separator if written.opening else None
    rules = _call_rules(form, schemas, heads, written.after, separator, opening, written.closing)
    until = rf"until[lazy]: /(.|\n)*{re.escape(trigger).replace('/', chr(92) + '/')}/"
    return lark(f"(until calls){'*' if parallel else '?'} text", [f"text: {ANY_TEXT}", until, *rules], thought)


def _begun(form: ToolFormat, schemas: Mapping[str, Schema], control: Collection[str]) -> tuple[str, str, str]:
    """What the prompt ends with, and what is left of the opening and of what stands before a name."""
    written, trigger = form.written, form.triggers[0]
    if trigger not in control or form.bare:
        return "", written.opening, written.before
    if written.opening:
        return trigger, written.opening.removeprefix(trigger), written.before
    begun, before = trigger, written.before.removeprefix(trigger)
    if len(schemas) == 1 and written.between in control:
        begun += before + next(iter(schemas)) + written.between
    return begun, "", before


def _up_to_mark(text: str, control: Collection[str]) -> str:
    """``text`` without its control tokens, which must stand at its end."""
    for mark in control:
        if mark in text:
            return text[: text.index(mark)].rstrip()
    return text


def _call_rules(
    form: ToolFormat,
    schemas: Mapping[str, Schema],
    heads: Mapping[str, str],
    after: str,
    separator: str | None,
    opening: str,
    closing: str,
) -> list[str]:
    """``heads`` is, by name, what stands before the arguments; without a ``separator`` there is one call."""
    calls = "call" if separator is None else f"call ({_text(separator)} call)*"
    rules = [
        f"calls: {_text(opening)} {calls} {_text(closing)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(schemas))),
    ]
    bare = form.name == "qwen3_coder"
    for index, (name, schema) in enumerate(schemas.items()):
        rules.append(f"call_{index}: {_text(heads[name])} args_{index} {_text(after)}")
        rules.append(f"args_{index}: {_bare_parameters(schema, name) if bare else _json_arguments(schema)}")
    if bare:
        rules.append(f"bare[suffix={json.dumps(_END)}]: {ANY_TEXT}")
    return rules


def _json_arguments(schema: Schema) -> str:
    closed = dict(schema)
    # A tool takes the arguments that its schema names: others would keep to the schema, too, and be of no use.
    if not any(word in closed for word in _COMPOSED):
        closed.setdefault("additionalProperties", False)
    return json_rule(closed)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


_NOT_BARE = frozenset({*_COMPOSED, "$defs", "definitions"})
_OF_TEXTS = frozenset({"pattern", "minLength", "maxLength", "format", *_COMPOSED})
_END = "\n</parameter>\n"


def _bare_parameters(schema: Schema, name: str) -> str:
    """Each parameter in its tags, in the schema's order; texts stand there bare."""
    _refuse(_NOT_BARE & schema.keys(), name)
    required = schema.get("required", [])
    parts = []
    for key, one in schema.get("properties", {}).items():
        head = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        part = f"{head} {_bare_value(one, f'{name}.{key}')}"
        parts.append(part if key in required else f"({part})?")
    return " ".join(parts) or '""'


def _bare_value(schema: Schema | bool, name: str) -> str:
    if isinstance(schema, bool) or schema.get("type") != "string":
        return f"{json_rule(schema)} {json.dumps(_END)}"
    _refuse(_OF_TEXTS & schema.keys(), name)
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if given is None:
        return "bare"
    texts = (json.dumps(str(one) + _END, ensure_ascii=False) for one in given)
    return f"({' | '.join(texts)})"


def _refuse(words: frozenset[str] | set[str], name: str) -> None:
    if words:
        raise InvalidRequest(
            f"tools: {name!r:.100} uses {', '.join(sorted(words))}, which cannot be enforced in the way in which this "
            "model writes calls: spell the arguments out, or do not ask for a call",
            param="tools",
        )
