"""``firsttoken chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from firsttoken.cli.options import (
    ENGINE_OPTIONS,
    add_engine_options,
    add_log_level,
    add_model_argument,
    add_sampling_options,
    engine_args,
    sampling_fields,
)
from firsttoken.cli.streams import is_terminal
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.cli.conversation import Source
    from firsttoken.core.engine_args import EngineArgs

NAME = "chat"
HELP = "talk to a model in this terminal"
EPILOG = """\
Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset starts afresh, /help lists the rest. From a pipe, each line
is a turn and only the answers are printed. With --url what is not said here is the server's to choose: where the
model says nothing either that is a temperature of 1, at which small models wander.

examples:
  firsttoken chat
  firsttoken chat --url http://127.0.0.1:8000 --temperature 0.2 --system "You are a pirate."
  echo "What is the capital of France?" | firsttoken chat
"""

MAX_TOKENS = 1024
# Fields of the engine that have no flag here: a conversation is alone.
_WITHOUT = ("served_model_name", "seed", "targets")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--url", help="talk to this OpenAI-compatible server instead of running an engine here")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (with --url)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="with --url https://...: trust the certificates in this file (PEM) alone"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message, first in the conversation")
    add_log_level(parser, "warning")
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_engine_options(parser, without=_WITHOUT)


def run(options: argparse.Namespace) -> int:
    fields = {"max_tokens": MAX_TOKENS, **sampling_fields(options)}
    return _local(options, fields) if options.url is None else _remote(options, fields)


def _local(options: argparse.Namespace, fields: dict[str, Any]) -> int:
    from firsttoken.engine.launch import engine_process

    if options.api_key is not None:
        raise ConfigError("--api-key goes with --url: an engine that is started here asks for none")
    if options.ca_file is not None:
        raise ConfigError("--ca-file goes with --url: it says whom to trust behind https")
    args = engine_args(options)
    _check_can_chat(args)
    with engine_process(args) as handle:
        from firsttoken.cli.conversation import LocalSource
        from firsttoken.cli.progress import loading

        with loading(args.model):
            source = LocalSource(args, fields, handle)
        return _talk(options, source)


def _remote(options: argparse.Namespace, fields: dict[str, Any]) -> int:
    from firsttoken.cli.conversation import RemoteSource

    local = [name for name in ENGINE_OPTIONS if name not in _WITHOUT and hasattr(options, name)]
    if local:
        flag = "--" + local[0].replace("_", "-")
        raise ConfigError(f"{flag} is for an engine that is started here: the one behind --url has its own")
    model = getattr(options, "model", None)
    return _talk(
        options, RemoteSource(options.url, fields, api_key=options.api_key, model=model, ca_file=options.ca_file)
    )


def _talk(options: argparse.Namespace, source: Source) -> int:
    """Hold the conversation, and close ``source``."""
    try:
        from rich.console import Console

        from firsttoken.cli.terminal import HELP as KEYS
        from firsttoken.cli.terminal import Chat, pipe_reader, terminal_reader

        interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        console = Console(soft_wrap=True)
        if interactive:
            console.print(f"{source.model}\n{KEYS}", style="dim", markup=False, highlight=False)
        chat = Chat(source, console, system=options.system, interactive=interactive)
        return chat.run(terminal_reader() if interactive else pipe_reader(sys.stdin))
    finally:
        source.close()


def _check_can_chat(args: EngineArgs) -> None:
    """Fetches the model if need be. Raises `ConfigError` where it could never answer, before seconds of loading."""
    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.cli.progress import transfer_progress

    with transfer_progress() as on_progress:
        checkpoint = open_checkpoint(args.model, offline=args.offline, on_progress=on_progress, revision=args.revision)
    needs = (("tokenizer", checkpoint.tokenizer), ("chat template", args.chat_template or checkpoint.chat_template))
    missing = " and no ".join(what for what, has in needs if has is None)
    if missing:
        raise ConfigError(f"{args.model} has no {missing}: chat needs a model with a tokenizer and a chat template")
