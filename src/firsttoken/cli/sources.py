"""Where the values of a server's options come from: flags, then ``FIRSTTOKEN_*`` variables, then a file; the first that
says something is it. What none of them says has its default, or is resolved by the engine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from firsttoken.cli.config_file import SECRETS, is_switch, keys_of, read_config
from firsttoken.core.errors import ConfigError
from firsttoken.core.meant import meant
from firsttoken.server.config import ServerConfig
from firsttoken.server.key_file import read_keys

PREFIX = "FIRSTTOKEN_"
# Variables of other parts of the program.
_OTHERS = frozenset({"FIRSTTOKEN_CACHE"})
_FILE = "FIRSTTOKEN_CONFIG"
# What Kubernetes sets in a pod for a Service called "firsttoken" beside it.
_SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+")
_SERVICE_PORT = re.compile(r"(tcp|udp)://\S+")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Source:
    """Which of them it was, and its name there."""

    kind: Literal["flag", "environment", "file"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


def settle(
    options: argparse.Namespace, parser: argparse.ArgumentParser, environ: Mapping[str, str]
) -> dict[str, Source]:
    """Give ``options``, made by ``parser``, what the environment and the file say where the command line does not;
    returns where each value came from, by its name in ``options``.

    Raises `ConfigError` for a variable, file, key or value that is not understood.
    """
    keys = keys_of(parser)
    names = {action.dest: name for name, action in keys.items()}
    found = {
        dest: Source("flag", keys[name].option_strings[-1] if keys[name].option_strings else "")
        for dest, name in names.items()
        if hasattr(options, dest)
    }
    for variable, action, value in _read_environment(environ, keys):
        if action.dest not in found:
            setattr(options, action.dest, value)
            found[action.dest] = Source("environment", variable)
    path = options.config or (Path(environ[_FILE]) if environ.get(_FILE) else None)
    if path is not None:
        for dest, value in read_config(path, keys).items():
            if dest not in found:
                setattr(options, dest, value)
                found[dest] = Source("file", str(path))
    return found


def variable_of(key: str) -> str:
    """The variable for an option."""
    return PREFIX + key.replace("-", "_").upper()


def _read_environment(
    environ: Mapping[str, str], keys: Mapping[str, argparse.Action]
) -> list[tuple[str, argparse.Action, Any]]:
    known = {variable_of(key): action for key, action in keys.items()}
    found = []
    for variable, text in environ.items():
        # One that is empty is as if it were not set: a shell cannot always take it away.
        if not variable.startswith(PREFIX) or variable in _OTHERS or variable == _FILE or not text:
            continue
        if _SERVICE_LINK.fullmatch(variable[len(PREFIX) :]) or _SERVICE_PORT.fullmatch(text):
            raise ConfigError(
                f"{variable} is what Kubernetes tells of a Service called firsttoken, and would be taken for an "
                "option: set enableServiceLinks to false in the pod, or call the Service otherwise"
            )
        if variable not in known:
            raise ConfigError(
                f"unknown variable {variable:.80} in the environment; an option's is its flag in capitals, as "
                f"{variable_of('max-model-len')}{meant(variable, [*known, *_OTHERS, _FILE])}"
            )
        action = known[variable]
        try:
            found.append((variable, action, _value(action, text)))
        except argparse.ArgumentTypeError as error:
            shown = "..." if action.dest in SECRETS else text[:80]
            raise ConfigError(f"{variable} = {shown} in the environment: {error}") from None
    return found


def _value(action: argparse.Action, text: str) -> Any:
    """As the flag would have read it; of an option that may be repeated each line is one."""
    if is_switch(action):
        if (value := _WORDS.get(text.strip().lower())) is None:
            raise argparse.ArgumentTypeError("expected true or false")
        return value
    if isinstance(action, argparse._AppendAction):
        return [line for line in text.splitlines() if line]
    if action.choices is not None:
        if text not in action.choices:
            raise argparse.ArgumentTypeError("expected one of " + ", ".join(map(str, action.choices)))
        return text
    if action.type is float:
        try:
            return float(text)
        except ValueError:
            raise argparse.ArgumentTypeError("expected a number") from None
    return action.type(text) if callable(action.type) else text


def server_config(options: argparse.Namespace) -> ServerConfig:
    """`ServerConfig` from what was given, with the keys of a file of keys; raises `ConfigError`."""
    given = {name: getattr(options, name) for name in ServerConfig.__struct_fields__ if hasattr(options, name)}
    if (path := given.get("api_key_file")) is not None:
        given["api_keys"] = [*given.get("api_keys", ()), *read_keys(path)]
    try:
        return msgspec.convert(given, ServerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"server options: {error}") from None
