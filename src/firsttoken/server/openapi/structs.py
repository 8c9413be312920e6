"""The structs that the server decodes requests with, as types that describe what it honours."""

from __future__ import annotations

import types
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from firsttoken.server.openapi.fields import FRACTIONS, describe, raw_type
from firsttoken.server.refusals import refused_fields

# How the server types numbers that must be whole: JSON's 3.0 is one, too, and so it is to JSON Schema's "integer".
_NUMBER = {int, float}


class Described:
    """Descriptions, one for each struct, of which others may hold some."""

    def __init__(self) -> None:
        self._made: dict[type[msgspec.Struct], type[msgspec.Struct]] = {}

    def struct(self, struct: type[msgspec.Struct], *, nested: bool = False) -> type[msgspec.Struct]:
        """``struct`` without the fields that are refused, and with each other's type, bounds and description. Raises
        `LookupError` naming a field of a request (one that is not ``nested``) without a description, or of any
        struct that is kept raw and of an unknown type."""
        if struct not in self._made:
            self._made[struct] = self._describe(struct, nested)
        return self._made[struct]

    def _describe(self, struct: type[msgspec.Struct], nested: bool) -> type[msgspec.Struct]:
        hints = get_type_hints(struct, include_extras=True)
        refused = set(refused_fields(struct))
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for field in msgspec.structs.fields(struct):
            if field.name in refused:
                continue
            hint = hints[field.name]
            kind, required = self._kind(struct, field, hint)
            told = describe(struct.__name__, field.name, optional=nested)
            if told is not None:
                kind = Annotated[kind, msgspec.Meta(description=told.text, extra_json_schema=told.bounds)]
            fields.append((field.encode_name, kind) if required else (field.encode_name, kind, None))
        return msgspec.defstruct(
            struct.__name__,
            fields,
            kw_only=True,
            tag=struct.__struct_config__.tag,
            tag_field=struct.__struct_config__.tag_field,
            forbid_unknown_fields=struct.__struct_config__.forbid_unknown_fields,
        )

    def _kind(self, struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo, hint: Any) -> tuple[Any, bool]:
        """The type of a field, and whether it must be there: a raw one is unless it takes null."""
        if hint is msgspec.Raw:
            kind = self._convert(raw_type(struct.__name__, field.name), field.name)
            return kind, type(None) not in get_args(kind)
        return self._convert(hint, field.name), field.required

    def _convert(self, kind: Any, name: str) -> Any:
        """``kind`` with described structs in it, and whole numbers where `sampling.whole` checks for them."""
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(kind, nested=True)
        origin, parts = get_origin(kind), get_args(kind)
        if origin is list:
            return list[self._convert(parts[0], name)]  # type: ignore[misc]  # a type that is made here
        if origin not in (Union, types.UnionType):
            return kind
        made = {self._convert(one, name): None for one in parts}
        if made.keys() >= _NUMBER:
            del made[int if name in FRACTIONS else float]
        return Union[tuple(made)]  # noqa: UP007  # of as many as there are
