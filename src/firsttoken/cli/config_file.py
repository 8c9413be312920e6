"""``serve --config FILE``: the command line's options from TOML or YAML, by the same names."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from firsttoken.cli.options import natural_int, port, positive_int, size, targets, whole_int
from firsttoken.core.errors import ConfigError
from firsttoken.core.meant import meant
from firsttoken.core.vllm_options import vllm_hint

# Flags that say nothing about what is served.
_NOT_KEYS = frozenset({"help", "config", "json"})
_WHOLE = frozenset({natural_int, port, positive_int, whole_int})
# Options whose values are nobody's business but their own.
SECRETS = frozenset({"api_keys"})


def keys_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What a file may say: the positional arguments by their name, the flags by theirs, without the dashes."""
    keys: dict[str, argparse.Action] = {}
    for action in parser._actions:
        name = next((flag[2:] for flag in action.option_strings if flag.startswith("--")), action.dest)
        if name not in _NOT_KEYS:
            keys[name] = action
    return keys


def read_config(path: Path, keys: dict[str, argparse.Action]) -> dict[str, Any]:
    """The file's values, by the names that the parser gives them.

    Raises `ConfigError` for a file, key or value that is not understood.
    """
    fields: dict[str, Any] = {}
    for key, value in _read_table(path).items():
        action = keys.get(str(key).replace("_", "-"))
        if _is_table(value):
            raise ConfigError(f"{path}: [{key}] is a table: keys are not in tables here, write them at the file's top")
        if action is None:
            advice = vllm_hint(str(key)) or f"; known are {', '.join(sorted(keys))}{meant(str(key), keys)}"
            raise ConfigError(f"{path}: unknown option {key!r:.80}{advice}")
        if action.dest in fields:
            raise ConfigError(f"{path}: {key} is given twice, with - and with _")
        try:
            fields[action.dest] = _value(action, value)
        except argparse.ArgumentTypeError as error:
            shown = "..." if action.dest in SECRETS else _shown(value)  # keys stay out of logs
            raise ConfigError(f"{path}: {key} = {shown}: {error}") from None
    return fields


def _read_table(path: Path) -> dict[Any, Any]:
    as_yaml = path.suffix in (".yaml", ".yml")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    try:
        table = _yaml(data) if as_yaml else tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {'YAML' if as_yaml else 'TOML'}: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must hold keys and values, as in port: 9000")
    return table


def _yaml(data: bytes) -> Any:
    import yaml

    try:
        table = yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    return {} if table is None else table


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def _value(action: argparse.Action, value: Any) -> Any:
    """As the flag would have read it; raises ``ArgumentTypeError`` in the words of someone who writes TOML."""
    if is_switch(action):
        return _expect(isinstance(value, bool), value, "true or false")
    if isinstance(action, argparse._AppendAction):
        texts = [value] if isinstance(value, str) else value
        fits = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        return _expect(fits, texts, "text in quotes, or a list of such")
    if action.choices is not None:
        return _expect(value in list(action.choices), value, "one of " + ", ".join(f'"{c}"' for c in action.choices))
    number = isinstance(value, int) and not isinstance(value, bool)
    if action.type is size:
        return size(str(_expect(number or isinstance(value, str), value, 'a size, as in "2GiB", or a number of bytes')))
    if action.type in _WHOLE and callable(action.type):
        return action.type(str(_expect(number, value, "a whole number, without quotes")))
    if action.type is targets:
        return targets(_expect(isinstance(value, str), value, "a file's path in quotes"))
    if action.type is float:
        return float(_expect(number or isinstance(value, float), value, "a number, without quotes"))
    return _expect(isinstance(value, str), value, "text in quotes")


def is_switch(action: argparse.Action) -> bool:
    """Whether it is on or off."""
    return action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)


def _expect(fits: bool, value: Any, expected: str) -> Any:
    if not fits:
        raise argparse.ArgumentTypeError(f"expected {expected}")
    return value


def _shown(value: Any) -> str:
    """About as the file has it."""
    return json.dumps(value, ensure_ascii=False, default=str)[:80]
