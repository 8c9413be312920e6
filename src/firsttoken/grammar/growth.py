"""How much farther from its end a piece of an answer can take it, by what a JSON schema says.

JSON's own characters that begin something cut a text into pieces: each of ``"{[,:``, and each run of others between
them (a key, a number, the text of a string, in which nothing but its end is one of them: `pieces`). Whatever a piece
decides, the way to the end is then no longer than the way to the end of what is around it and the largest of the
smallest values that the schema names. So an answer's way need only be looked for when the sum of such bounds comes near
what is left of its budget. Where that cannot be told it is looked for after each token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from firsttoken.core.grammar import Grammar

BEGINNERS = b'"{[,:'
# The smallest value of no schema at all, whichever way it is begun, and what may be open inside a number or an escape.
_ANY = 5
_NUMBER = 8
# Keywords of which it is not told here what they make of a value's size.
_UNTOLD = (
    "allOf",
    "pattern",
    "format",
    "patternProperties",
    "minProperties",
    "multipleOf",
    "propertyNames",
    "$dynamicRef",
)


def growth_of(grammar: Grammar) -> int | None:
    """Bytes that one piece may add; None where that cannot be told."""
    sizes = _Sizes()
    if grammar.kind == "json_schema":
        try:
            schema = msgspec.json.decode(grammar.source)
            sizes.of_all(schema)
        except (_Untold, RecursionError):
            return None
    elif grammar.kind != "json_object":
        return None
    return sizes.largest + sizes.key + _NUMBER


class _Untold(Exception):
    pass


class _Sizes:
    """The largest of a schema's smallest values, and of its keys, in bytes."""

    def __init__(self) -> None:
        self.largest = _ANY
        self.key = 8

    def of_all(self, root: Any) -> None:
        """Of what may be begun inside an answer: the whole of it is only where it is part of itself, which is untold,
        or one of several that it may be."""
        if isinstance(root, dict):
            several = any(name in root for name in ("anyOf", "oneOf", "enum", "$ref")) or isinstance(
                root.get("type", []), list
            )
            size = self._of(root, root, ())
            self.largest = max(self.largest, size) if several else self.largest

    def of(self, schema: Any, root: Any, path: tuple[str, ...]) -> int:
        """Bytes of the smallest value; of several kinds of value the one with the largest. Raises `_Untold`."""
        size = self._of(schema, root, path) if isinstance(schema, dict) else _ANY
        self.largest = max(self.largest, size)
        return size

    def _of(self, schema: dict[str, Any], root: Any, path: tuple[str, ...]) -> int:
        if any(name in schema for name in _UNTOLD):
            raise _Untold
        sizes = [0]
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in path:
                raise _Untold
            sizes.append(self.of(_resolve(root, ref), root, (*path, ref)))
        literals = [schema["const"]] if "const" in schema else schema.get("enum", [])
        sizes += [len(msgspec.json.encode(value)) + 6 for value in literals]
        for name in ("anyOf", "oneOf"):
            sizes += [self.of(branch, root, path) for branch in schema.get(name, ())]
        kinds = schema.get("type", ["string", "number", "object", "array"])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            sizes.append(self._of_kind(kind, schema, root, path))
        return max(sizes)

    def _of_kind(self, kind: str, schema: dict[str, Any], root: Any, path: tuple[str, ...]) -> int:
        match kind:
            case "string":
                return int(schema.get("minLength", 0)) + 2
            case "number" | "integer":
                bounds = [schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
                return max((len(repr(bound)) + _NUMBER for bound in bounds if bound is not None), default=2)
            case "array":
                return self._of_array(schema, root, path)
            case "object":
                return self._of_object(schema, root, path)
            case _:
                return _ANY

    def _of_array(self, schema: dict[str, Any], root: Any, path: tuple[str, ...]) -> int:
        first = [self.of(item, root, path) + 2 for item in schema.get("prefixItems", ())]
        item = self.of(schema.get("items", True), root, path) + 2
        count = int(schema.get("minItems", 0))
        return 2 + sum(first[:count]) + item * max(0, count - len(first))

    def _of_object(self, schema: dict[str, Any], root: Any, path: tuple[str, ...]) -> int:
        properties = schema.get("properties", {})
        sizes = {name: self._of_key(name) + self.of(value, root, path) for name, value in properties.items()}
        other = self.of(schema.get("additionalProperties", True), root, path)
        required = schema.get("required", ())
        return 2 + sum(sizes.get(name, self._of_key(name) + other) for name in required)

    def _of_key(self, name: str) -> int:
        size = len(msgspec.json.encode(name)) + 4
        self.key = max(self.key, size)
        return size


def _resolve(root: Any, ref: object) -> Any:
    """Where a reference inside the schema points to. Raises `_Untold` for any other."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        raise _Untold
    found = root
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise _Untold
        found = found[name]
    return found
