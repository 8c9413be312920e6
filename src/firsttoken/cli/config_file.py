"""``serve --config FILE``: the command line's options from TOML, by the same names; what the command line says wins."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.cli.options import ENGINE_OPTIONS, size
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.server.config import ServerConfig

_SERVER = frozenset(ServerConfig.__struct_fields__)
_ENGINE = frozenset(EngineArgs.__struct_fields__)
_SIZES = frozenset({"max_body_bytes"} | {name for name, option in ENGINE_OPTIONS.items() if option.parse is size})


def read_config(path: Path) -> dict[str, Any]:
    """The file's options by field name. Raises `ConfigError` for a file or key that is not understood."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    fields: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name == "api_key":
            name, value = "api_keys", [value] if isinstance(value, str) else value
        if name not in _SERVER | _ENGINE:
            known = ", ".join(sorted(field.replace("_", "-") for field in _SERVER | _ENGINE))
            raise ConfigError(f"{path}: unknown option {key!r}; known are {known}")
        if name in _SIZES and isinstance(value, str):
            try:
                value = size(value)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{path}: {key}: {error}") from None
        fields[name] = value
    return fields


def server_config(options: argparse.Namespace, base: dict[str, Any]) -> ServerConfig:
    """`ServerConfig` from the command line over the file's values; raises `ConfigError`."""
    given = {name: getattr(options, name) for name in _SERVER if hasattr(options, name)}
    merged = {name: value for name, value in base.items() if name in _SERVER} | given
    try:
        return msgspec.convert(merged, ServerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"server options: {error}") from None


def engine_fields(base: dict[str, Any]) -> dict[str, Any]:
    """The file's values that belong to the engine."""
    return {name: value for name, value in base.items() if name in _ENGINE}
