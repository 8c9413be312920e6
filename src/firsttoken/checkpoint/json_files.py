"""Reading JSON files of a model folder: bounded, and every wrong value is reported with file and field."""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.core.errors import CheckpointError

MAX_CONFIG_BYTES = 16 << 20
_MISSING = object()


def read_bytes(path: Path, limit: int) -> bytes:
    """The file's content; raises `CheckpointError` when it is missing, unreadable or larger than ``limit`` bytes."""
    try:
        found = path.stat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            # A pipe would be waited for, and some devices never end.
            raise CheckpointError("is no regular file: put the file itself there", file=str(path))
        if found.st_size > limit:
            raise CheckpointError(f"is {found.st_size} bytes long, at most {limit} are allowed", file=str(path))
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror or error})", file=str(path)) from error


def read_text(path: Path, limit: int = MAX_CONFIG_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is not valid UTF-8 (at byte {error.start})", file=str(path)) from error


class JSONObject:
    """A JSON object with typed access. ``field`` is the place inside the file, for messages."""

    def __init__(self, file: str, values: Mapping[str, Any], field: str = "") -> None:
        self.file = file
        self.values = values
        self.field = field

    def __contains__(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.values.get(key) is not None

    def fail(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file, field=f"{self.field}.{key}" if self.field else key)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise self.fail(key, "is missing")
            return default
        return value

    def integer(self, key: str, default: int | object = _MISSING) -> int:
        value = self._get(key, default)
        # Some writers spell whole numbers 8192.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, f"must be a whole number, got {value!r:.80}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def number(self, key: str, default: float | object = _MISSING) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(key, f"must be a finite number, got {value!r:.80}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {value!r:.80}")
        return value

    def optional_flag(self, key: str) -> bool | None:
        return self.flag(key, False) if key in self else None

    def text(self, key: str, default: str | object = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, got {value!r:.80}")
        return value

    def object(self, key: str) -> JSONObject | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, got {value!r:.80}")
        return JSONObject(self.file, value, f"{self.field}.{key}" if self.field else key)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise self.fail(key, f"must hold token ids, got {token!r:.80}")
        return tuple(ids)


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> JSONObject:
    """A file that holds one JSON object; raises `CheckpointError`."""
    return JSONObject(str(path), decode_json(read_bytes(path, limit), dict[str, Any], str(path)))


def decode_json(raw: bytes | memoryview, kind: Any, file: str, field: str | None = None) -> Any:
    """`msgspec.json.decode` whose errors are `CheckpointError`s."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"is not the JSON that is expected ({error})", file=file, field=field) from error
