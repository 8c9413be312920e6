"""``firsttoken config show``: what a server would run with, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from firsttoken.cli import serve
from firsttoken.cli.options import NO_FOLDER, HelpFormatter, engine_args
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import FirstTokenError
from firsttoken.core.service import Targets

if TYPE_CHECKING:
    from firsttoken.engine.resolve import Choice

NAME = "config"
HELP = "show what a server would run with, and where each value comes from"
EPILOG = """\
examples:
  firsttoken config show --config serve.toml
  FIRSTTOKEN_PORT=9000 firsttoken config show --json
"""
SHOW_EPILOG = """\
The options are those of "firsttoken serve". A flag goes over a variable of the environment (FIRSTTOKEN_PORT for
--port), that over the file of --config, that over the default; what nobody says and has no fixed default is resolved
by the engine, for which the model's description is read, but not its weights. Nothing is fetched. API keys are not
shown.
"""


# OpenTelemetry's own variables, which count where nothing else is said.
_OTEL = {"otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_protocol": "OTEL_EXPORTER_OTLP_PROTOCOL"}
# Of the column of values; longer ones move what follows in their line.
_VALUE_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Setting:
    """One option. ``source`` is flag, environment, file, default or resolved, ``origin`` the name there; ``why`` is the
    engine's reason for what it resolved."""

    name: str
    value: Any
    source: str
    origin: str = ""
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(title="what to do", dest="what", metavar="WHAT", required=True)
    show = parts.add_parser(
        "show", help=HELP, description=HELP.capitalize() + ".", epilog=SHOW_EPILOG, formatter_class=HelpFormatter
    )
    serve.add_arguments(show)
    show.add_argument("--json", action="store_true", help="one JSON object on stdout")
    show.set_defaults(parser=show)


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli.config_file import keys_of
    from firsttoken.cli.sources import server_config, settle
    from firsttoken.engine.resolve import Choice

    sources = settle(options, options.parser, os.environ)
    config, args = server_config(options), engine_args(options)
    given = {name: getattr(config, name) for name in config.__struct_fields__}
    given |= {name: getattr(args, name) for name in args.__struct_fields__}
    given["api_keys"] = getattr(options, "api_keys", ())  # without those of a file of keys
    given |= {"log_level": getattr(options, "log_level", serve.LOG_LEVEL)}
    given |= {"log_format": getattr(options, "log_format", "text")}
    choices, trouble = _choices(args)
    if "flight_dir" not in sources:
        folder = str(serve.flight_folder() or NO_FOLDER)
        choices["flight_dir"] = Choice("flight_dir", folder, "the user's folder for what programs keep")
    settings = []
    for name, action in keys_of(options.parser).items():
        source = sources.get(action.dest)
        value = _shown(action.dest, given[action.dest])
        if source is not None:
            settings.append(Setting(name, value, source.kind, source.name))
        elif (choice := choices.get(action.dest)) is not None:
            settings.append(Setting(name, choice.value, "resolved", "", choice.why))
        elif (variable := _OTEL.get(action.dest)) is not None and os.environ.get(variable):
            value = _shown(action.dest, os.environ[variable])
            settings.append(Setting(name, value, "environment", variable))
        else:
            settings.append(Setting(name, value, "default"))
    if options.json:
        from firsttoken.cli import report

        head = report.header(command="firsttoken config show", model=args.model)  # whose words may hold keys
        print(json.dumps(head | {"settings": [asdict(one) for one in settings], "not_resolved": trouble}))
    else:
        _print(settings, trouble)
    return 0 if trouble is None else 1


def _choices(args: EngineArgs) -> tuple[dict[str, Choice], str | None]:
    """What the engine would choose, by the options' names; and why that is not known, where it is not."""
    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.devices.registry import known_devices
    from firsttoken.engine.resolve import Choice, resolve

    made: list[Choice] = []
    try:
        checkpoint = open_checkpoint(args.model, offline=True, revision=args.revision)
        _, config = resolve(args, checkpoint, known_devices(), made=made.append)
    except FirstTokenError as error:
        return {one.option: one for one in made}, str(error)
    executor = config.executor
    more = {
        "served_model_name": (config.model, "the model's own name"),
        "threads": (executor.threads, "as many as there are cores; fewer while other programs take some"),
        "in_flight": (config.in_flight, "the device's own"),
    }
    found = {name: Choice(name, str(value), why) for name, (value, why) in more.items()}
    return found | {one.option: one for one in made}, None


def _shown(dest: str, value: Any) -> Any:
    """As JSON has it, without secrets."""
    from firsttoken.cli.config_file import SECRETS

    if dest in SECRETS:
        return ["***"] * len(value)
    if isinstance(value, Targets):
        return msgspec.to_builtins(value)
    if dest == "otlp_endpoint" and value is not None and (user := urlsplit(value).netloc.rpartition("@")[0]):
        return value.replace(user, "***", 1)
    return list(value) if isinstance(value, tuple) else value


def _print(settings: Iterable[Setting], trouble: str | None) -> None:
    """A line an option, whole: it may be for grep, and a path that is cut is of no use to anybody."""
    rows = []
    for one in settings:
        whence = " ".join(word for word in (one.source, one.origin) if word)
        rows.append((one.name, _words(one.name, one.value), f"{whence}: {one.why}" if one.why else whence))
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(_VALUE_WIDTH, max(len(value) for _, value, _ in rows))
    for name, value, whence in rows:
        print(f"{name:<{name_width}}  {value:<{value_width}}  {whence}")
    if trouble is not None:
        print(f"\nnot resolved: {trouble}")


def _words(name: str, value: Any) -> str:
    if value is None or value in ([], ()):
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "as its file says" if value != msgspec.to_builtins(Targets()) else "-"
    return str(value)
