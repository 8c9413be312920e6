"""What a conversation's answers are held to: calls that must be made, or made right, and the grammar that was asked
for, after what the model thinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.server.tools import ToolUse
from firsttoken.text.answer_formats import AnswerFormats
from firsttoken.text.reasoning import Thinks
from firsttoken.text.thought_grammar import Thought, lark, rule_of
from firsttoken.text.tools.grammar import forced_calls, strict_calls

_ANY = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class Constraint:
    """``grammar`` of what follows the prompt, which ends with ``closed`` (of a thought that is cut off here) and
    ``begun`` (of a call); both have control tokens. ``thinks``: what is left of it."""

    grammar: Grammar | None
    thinks: Thinks
    closed: str = ""
    begun: str = ""


def constrain(tools: ToolUse | None, grammar: Grammar | None, formats: AnswerFormats, thinks: Thinks) -> Constraint:
    """``grammar`` is what the content must be. What is thought comes first and is held to nothing; where it could not
    be told apart (its marks are control tokens, a call begins with one, the grammar is Lark), nothing is thought.
    Raises `InvalidRequest` for what cannot be enforced."""
    if tools is None or formats.tools is None:
        return _answer(grammar, formats, thinks)
    if not (tools.forced or grammar is not None or any(tool.strict for tool in tools.callable)):
        return Constraint(None, thinks)
    form, control = formats.tools, formats.tool_marks.texts
    held_back = form.triggers[0] in control and not form.bare
    try:
        if tools.forced:
            thinks, closed, thought = _thought(formats, thinks, possible=not held_back)
            schemas = {tool.name: tool.schema for tool in tools.callable}
            calls = forced_calls(form, schemas, control, thought, parallel=tools.parallel)
            return Constraint(calls.grammar, thinks, closed, calls.begun)
        if held_back:
            raise _beside(grammar)
        thinks, closed, thought = _thought(formats, thinks)
        offered: dict[str, Mapping[str, Any]] = {
            tool.name: tool.schema if tool.strict or grammar is not None else _ANY for tool in tools.callable
        }
        made = strict_calls(form, offered, thought, parallel=tools.parallel, answer=grammar)
        return Constraint(made, thinks, closed)
    except InvalidRequest as error:
        param = "tools" if error.param == "grammar" else error.param
        raise InvalidRequest(error.message, param=param, code=error.code) from None


def _answer(grammar: Grammar | None, formats: AnswerFormats, thinks: Thinks) -> Constraint:
    if grammar is None or thinks == "no":
        return Constraint(grammar, thinks)
    rule = rule_of(grammar)
    thinks, closed, thought = _thought(formats, thinks, possible=rule is not None)
    if rule is not None and thought.rules:
        grammar = lark("answer", [f"answer: {rule}"], thought)
    return Constraint(grammar, thinks, closed)


def _thought(formats: AnswerFormats, thinks: Thinks, *, possible: bool = True) -> tuple[Thinks, str, Thought]:
    """What may be thought, what ends a thought that the prompt has begun and that is not ``possible``, its rules."""
    reasoning = formats.reasoning
    if reasoning is None or thinks == "no" or (possible and not formats.reasoning_marks.texts):
        return thinks, "", Thought.of(reasoning, thinks)
    return "no", f"{reasoning.closing}\n\n" if thinks == "on" else "", Thought()


def _beside(grammar: Grammar | None) -> InvalidRequest:
    if grammar is None:
        return InvalidRequest(
            "strict cannot be enforced with tool_choice 'auto': this model begins its calls with a control token, and "
            "what comes before one is free; leave strict out, or force the call with tool_choice",
            param="tools",
            code="unsupported_parameter",
        )
    return InvalidRequest(
        "tools cannot be used together with a grammar for the answer: this model begins its calls with a control "
        "token, which no grammar allows; leave one of them out, or force the call with tool_choice",
        param="tools",
        code="unsupported_parameter",
    )
