"""The file of ``--targets``: what service classes are promised and what API keys may ask for, in TOML.

::

    [class.p0]
    ttft_p99 = "80ms"
    itl_p99 = "20ms"
    max_queue = "10ms"
    weight = 4
    [class.p2]
    starts_within = "30s"
    max_waiting = 64
    [keys]
    "key-name" = { max_class = "p0", class = "p1", share = 1.0, cache_group = "team-a" }
    "other-name" = { requests_per_minute = 60, tokens_per_minute = 20000, max_concurrent = 4 }

What a class leaves out stays as it is without a file. Every error says the file, the place in it and the value.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from firsttoken.core.duration import milliseconds
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import CLASS_NAMES, ClassTargets, KeyRule, ServiceClass, Targets

T = TypeVar("T")

KEY_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""What a key may be called: it can be told from the key in ``--api-key NAME=KEY``."""

_MAX_MS = 24 * 60 * 6e4


def read_targets(path: str | os.PathLike[str]) -> Targets:
    """The targets of a file; times become milliseconds. Raises `ConfigError`."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read targets {os.fspath(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python reads
        raise ConfigError(f"{os.fspath(path)} is not valid TOML: {error}") from None
    return parse_targets(table, os.fspath(path))


def parse_targets(table: Mapping[str, Any], name: str) -> Targets:
    """The targets in ``table``, which errors call ``name``. Raises `ConfigError`."""
    try:
        _check_names("", table, ("class", "keys"), "entry")
        classes, keys = _table("class", table.get("class", {})), _table("keys", table.get("keys", {}))
        _check_names("class", classes, CLASS_NAMES, "class")
        defaults = Targets()
        return Targets(
            **{one: _class(f"class.{one}", classes.get(one, {}), getattr(defaults, one)) for one in CLASS_NAMES},
            keys={key: _rule(key, value) for key, value in keys.items()},
        )
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _class(place: str, value: Any, default: ClassTargets) -> ClassTargets:
    fields = {field: getattr(default, field) for field in ClassTargets.__struct_fields__}
    return _built(ClassTargets, fields | _fields(place, _table(place, value), _CLASS_FIELDS), place)


def _rule(key: str, value: Any) -> KeyRule:
    place = f'keys."{_cut(key)}"'
    if KEY_NAME.fullmatch(key) is None:
        raise ConfigError(f"{place}: a key's name has letters, digits, '.', '_' and '-' only")
    fields = _fields(place, _table(place, value), _KEY_FIELDS)
    if "class" in fields:
        fields["service_class"] = fields.pop("class")
    return _built(KeyRule, fields, place)


def _built(made: Callable[..., T], fields: Mapping[str, Any], place: str) -> T:
    """What the fields say together may be wrong too."""
    try:
        return made(**fields)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _fields(place: str, table: Mapping[str, Any], readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    _check_names(place, table, readers, "field")
    found = {}
    for field, value in table.items():
        try:
            found[field] = readers[field](value)
        except ValueError as error:
            raise ConfigError(f"{place}.{field} = {_shown(value)}: {error}") from None
    return found


def _check_names(place: str, table: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    for name in table:
        if name not in known:
            where = f"{place}: " if place else ""
            raise ConfigError(f"{where}unknown {what} {_cut(name)!r}; known are {', '.join(known)}")


def _table(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} = {_shown(value)}: expected a table, as in [{place}]")
    return value


# ------------------------------------------------------------------ values


def _milliseconds(value: Any) -> float:
    try:
        found = milliseconds(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError('expected a time with its unit, in quotes, as in "80ms" or "1.5s" (us, ms, s, min)') from None
    if not 0 < found <= _MAX_MS:
        raise ValueError("a time must be more than 0 and at most a day")
    return found


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number, without quotes")
    if not 1e-3 <= value <= 1e3:
        raise ValueError("expected a number from 0.001 to 1000")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number, without quotes")
    if not 1 <= value <= 10**9:
        raise ValueError("expected a whole number, 1 or more")
    return value


def _class_name(value: Any) -> ServiceClass:
    if value not in CLASS_NAMES:
        raise ValueError("expected " + " or ".join(f'"{name}"' for name in CLASS_NAMES))
    return ServiceClass(CLASS_NAMES.index(value))


def _group_name(value: Any) -> str:
    if not isinstance(value, str) or KEY_NAME.fullmatch(value) is None:
        raise ValueError("a group's name has letters, digits, '.', '_' and '-' only")
    return value


_CLASS_FIELDS: dict[str, Callable[[Any], Any]] = {
    "ttft_p99": _milliseconds,
    "itl_p99": _milliseconds,
    "max_queue": _milliseconds,
    "starts_within": _milliseconds,
    "weight": _number,
    "max_waiting": _count,
}
_KEY_FIELDS: dict[str, Callable[[Any], Any]] = {
    "max_class": _class_name,
    "class": _class_name,
    "share": _number,
    "cache_group": _group_name,
    "requests_per_minute": _count,
    "tokens_per_minute": _count,
    "max_concurrent": _count,
}


def _shown(value: Any) -> str:
    """About as the file has it."""
    return json.dumps(value, ensure_ascii=False, default=str)[:80]


def _cut(name: str) -> str:
    return name if len(name) <= 80 else name[:77] + "..."
