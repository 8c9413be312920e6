"""vLLM's names for what an answer must look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar

KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: one of the first five. White space between JSON's parts is at most one blank in any case.

    ``json`` is a schema, as a dict or as JSON; ``grammar`` is in llguidance's dialect of Lark. vLLM's other fields are
    not taken: they are unknown here.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    def as_grammar(self) -> Grammar:
        """Raises `InvalidRequest` where it is none, or several."""
        given = {name: value for name in KINDS if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs takes one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}",
                param="structured_outputs",
            )
        if self.disable_additional_properties:
            raise InvalidRequest(
                "structured_outputs.disable_additional_properties is not supported: say additionalProperties in the "
                "schema",
                param="structured_outputs.disable_additional_properties",
            )
        return grammar_of(*given.popitem())


def structured_outputs_of(given: object) -> StructuredOutputsParams:
    """One that was given as such or as a dict of its fields. Raises `InvalidRequest` that names the field."""
    if isinstance(given, StructuredOutputsParams):
        given = msgspec.structs.asdict(given)  # whose values nobody has looked at
    try:
        return msgspec.convert(given, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"structured_outputs: {error}", param="structured_outputs") from None


def grammar_of(kind: str, value: Any) -> Grammar:
    """``kind`` is one of `KINDS`. Raises `InvalidRequest`."""
    match kind:
        case "json":
            return schema_grammar(value)
        case "json_object":
            return Grammar("json_object")
        case "regex":
            return Grammar("regex", value)
        case "choice":
            return choice_grammar(value)
        case "grammar":
            return Grammar("lark", value)
        case _:
            raise InvalidRequest(f"structured_outputs takes one of {', '.join(KINDS)}, got {kind!r:.80}")


def schema_grammar(schema: Mapping[str, Any] | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())


def choice_grammar(texts: Sequence[str]) -> Grammar:
    return Grammar("choice", msgspec.json.encode(texts).decode())
