"""Calls that must be right, as a grammar in llguidance's dialect of Lark: in the model's own way of writing them, so
that what is made by the grammar is read as any other answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from firsttoken.core.errors import InvalidRequest
from firsttoken.text.thought_grammar import ANY_TEXT, Control, Thought, json_rule
from firsttoken.text.tools.reader import ToolFormat

Schema = Mapping[str, Any]
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties")


class ToolGrammar:
    """The grammars of answers of a model that writes calls in ``form``, and that may think first (``thought``)."""

    def __init__(self, form: ToolFormat, control: Control, thought: Thought) -> None:
        self._form = form
        self._control = control
        self._thought = thought

    def forced(self, schemas: Mapping[str, Schema], *, parallel: bool) -> str:
        """An answer that is calls of these tools and nothing else. Raises `InvalidRequest` for a schema that cannot be
        kept to."""
        return self._grammar("calls", [], schemas, parallel)

    def strict(self, schemas: Mapping[str, Schema], *, parallel: bool) -> str:
        """Any answer, but whatever call it has is right. Raises as `forced`."""
        form = self._form
        more = "*" if parallel else "?"
        if form.bare:  # whatever begins with a brace is a call
            # No other answer may begin as a thought does, or it could hide one.
            no = r"{\s" + re.escape(self._thought.mark)
            return self._grammar("(calls | other)", [rf"other: /([^{no}](.|\n)*)?/"], schemas, parallel)
        trigger = form.triggers[0]
        if self._control(trigger) is not None:
            return self._grammar(f"text (calls text){more}", [f"text: {ANY_TEXT}"], schemas, parallel)
        until = r"until[lazy]: /(.|\n)*" + re.escape(trigger).replace("/", r"\/") + "/"
        return self._grammar(f"(until calls){more} text", [f"text: {ANY_TEXT}", until], schemas, parallel, trigger)

    def _grammar(
        self, body: str, rules: list[str], schemas: Mapping[str, Schema], parallel: bool, eaten: str = ""
    ) -> str:
        """``eaten``: the beginning of a call, where what stands before calls has it already."""
        written = self._form.written
        calls = "call"
        if parallel and (not eaten or written.opening):
            calls = f"call ({self._spell(written.separator)} call)*"
        if written.opening:
            calls = f"{self._spell(written.opening.removeprefix(eaten))} {calls} {self._spell(written.closing)}"
            eaten = ""
        lines = [f"start: {self._thought.start}{body}", f"calls: {calls}"]
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(schemas))))
        for index, (name, schema) in enumerate(schemas.items()):
            head = (written.before + name + written.between).removeprefix(eaten)
            lines.append(f"call_{index}: {self._spell(head)} args_{index} {self._spell(written.after)}")
            lines.append(f"args_{index}: {self._arguments(schema, name)}")
        if self._form.name == "qwen3_coder":
            lines.append(f"bare[suffix={json.dumps(_END)}]: {ANY_TEXT}")
        return "\n".join([*lines, *rules, *self._thought.rules]) + "\n"

    def _arguments(self, schema: Schema, name: str) -> str:
        if self._form.name == "qwen3_coder":
            return _bare_parameters(schema, name)
        closed = dict(schema)
        # A tool takes the arguments that its schema names: others would keep to the schema, too, and be of no use.
        if not any(word in closed for word in _COMPOSED):
            closed.setdefault("additionalProperties", False)
        return json_rule(closed)

    def _spell(self, text: str) -> str:
        """``text`` as a sequence of terminals, control tokens by their ids."""
        ids = {mark: index for mark in self._form.markers if (index := self._control(mark)) is not None}
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text) if ids else [text]
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


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
