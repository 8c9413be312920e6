"""Typed access to GGUF metadata: a wrong type is an error that names the key, never a surprise later."""

from __future__ import annotations

import math
import mmap
import struct

import msgspec
import numpy as np
import numpy.typing as npt

from firsttoken.core.errors import CheckpointError

_U64 = struct.Struct("<Q")
_MISSING = object()


class ArrayField(msgspec.Struct, frozen=True):
    """An array left in the file: ``count`` elements from byte ``start``; ``code`` as in `struct`, "" for strings."""

    code: str
    count: int
    start: int


Scalar = int | float | bool
Field = Scalar | str | ArrayField


class GGUFMetadata:
    """Metadata fields by key. Invariant: array fields lie wholly inside the file (the reader checked them)."""

    def __init__(self, file: str, data: mmap.mmap, fields: dict[str, Field]) -> None:
        self.file = file
        self._data = data
        self._fields = fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def keys(self) -> list[str]:
        return list(self._fields)

    def fail(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file, field=key)

    def _get(self, key: str, default: object) -> object:
        value = self._fields.get(key, default)
        if value is _MISSING:
            raise self.fail(key, "is missing from the metadata: the file is incomplete; convert the model again")
        return value

    def integer(self, key: str, default: int | object = _MISSING) -> int:
        """A whole number; raises `CheckpointError` when missing (without ``default``) or of another type."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, f"must be one whole number, got {_describe(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self._fields else None

    def number(self, key: str, default: float | object = _MISSING) -> float:
        """A finite number."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(key, f"must be one finite number, got {_describe(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self._fields else None

    def text(self, key: str, default: str | object = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, got {_describe(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self._fields else None

    def optional_flag(self, key: str) -> bool | None:
        value = self._fields.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"must be a bool, got {_describe(value)}")
        return value

    def count(self, key: str) -> int:
        """Number of elements of an array, without decoding it."""
        return self._array(key).count

    def strings(self, key: str) -> list[str]:
        """Decode an array of strings; raises `CheckpointError` for other types and invalid UTF-8."""
        field = self._array(key)
        if field.code:
            raise self.fail(key, "must be an array of strings, got numbers")
        data, unpack, position = self._data, _U64.unpack_from, field.start
        texts: list[str] = []
        try:
            for _ in range(field.count):
                begin = position + 8
                position = begin + unpack(data, position)[0]
                texts.append(str(data[begin:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.fail(key, f"element {len(texts)} is not valid UTF-8") from error
        return texts

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        """An array of numbers as a read-only view of the file, ``[count]`` of the stored type."""
        field = self._array(key)
        if not field.code:
            raise self.fail(key, "must be an array of numbers, got strings")
        return np.frombuffer(self._data, dtype=np.dtype("<" + field.code), count=field.count, offset=field.start)

    def _array(self, key: str) -> ArrayField:
        value = self._get(key, _MISSING)
        if not isinstance(value, ArrayField):
            raise self.fail(key, f"must be an array, got {_describe(value)}")
        return value


def _describe(value: object) -> str:
    if isinstance(value, ArrayField):
        return f"an array of {value.count} {'values' if value.code else 'strings'}"
    return repr(value)[:80]
