"""``firsttoken serve``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.cli.options import (
    NO_FOLDER,
    add_engine_options,
    add_log_level,
    add_model_argument,
    engine_args,
    natural_int,
    port,
    positive_int,
    set_up_logging,
    size,
)
from firsttoken.core.errors import ConfigError
from firsttoken.core.parser_names import REASONING_PARSERS, TOOL_PARSERS

if TYPE_CHECKING:
    from firsttoken.text.prompt_templates import PromptTemplate

NAME = "serve"
HELP = "serve a model over an OpenAI-compatible HTTP API"
EPILOG = """\
The first SIGTERM or Ctrl-C lets running answers finish and takes no new ones; the second stops at once.

examples:
  firsttoken serve                                  the default model on 127.0.0.1:8000
  firsttoken serve model.gguf --port 9000 --kv-memory 2GiB
  firsttoken serve org/model --host 0.0.0.0 --api-key "$KEY"
  firsttoken serve --host 0.0.0.0 --port 8443 --ssl-certfile chain.pem --ssl-keyfile key.pem --api-key "$KEY"
  firsttoken serve --config serve.toml
  firsttoken serve --targets targets.toml --api-key "dashboard=$KEY"
  firsttoken serve --prompt-templates prompts.jsonl

targets.toml:
  [class.p0]
  ttft_p99 = "80ms"
  [keys]
  dashboard = { max_class = "p0", class = "p1", share = 2.0 }

prompts.jsonl:
  {"messages": [{"role": "system", "content": "You are the clerk of ..."}]}

serve.toml, with the flags' names (and model) as keys ("firsttoken config show" tells what comes of it):
  model = "org/model"
  port = 9000
  kv-memory = "2GiB"
"""

LOG_LEVEL = "info"

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="options from a TOML or YAML file (an example is below); variables of the environment, as FIRSTTOKEN_PORT "
        "for --port, go over it, and flags over both",
    )
    add_log_level(parser, LOG_LEVEL)
    group = parser.add_argument_group("server")
    absent = argparse.SUPPRESS
    group.add_argument("--host", default=absent, metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    group.add_argument("--port", type=port, default=absent, metavar="N", help="default: 8000; 0 takes a free one")
    group.add_argument(
        "--server",
        choices=("uvicorn", "granian"),
        default=absent,
        help="what speaks HTTP; granian has HTTP/2, and fewer limits: docs/operations.md (default: uvicorn)",
    )
    group.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        default=absent,
        metavar="KEY",
        help="ask callers for this key, on every route but health (may be repeated); NAME=KEY where --targets has a "
        "rule for NAME; FIRSTTOKEN_API_KEY in the environment, a key a line, where others could read the command line",
    )
    group.add_argument(
        "--api-key-file",
        default=absent,
        metavar="FILE",
        help="more keys, one a line, so that none is on the command line; sha256:HEX stands for a key that has this "
        "SHA-256 (as --api-key takes it, too)",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=absent,
        metavar="URL",
        help="let pages of this origin, as https://app.example.com, read answers in a browser (may be repeated; * is "
        "any; default: none)",
    )
    group.add_argument(
        "--ssl-certfile",
        default=absent,
        metavar="FILE",
        help="answer https with this certificate (PEM: the server's own, then those that vouch for it)",
    )
    group.add_argument(
        "--ssl-keyfile", default=absent, metavar="FILE", help="its private key (PEM; default: in --ssl-certfile's file)"
    )
    group.add_argument(
        "--max-body-bytes", type=size, default=absent, metavar="SIZE", help="largest request (default: 32MiB)"
    )
    group.add_argument(
        "--max-messages", type=positive_int, default=absent, metavar="N", help="longest conversation (default: 4096)"
    )
    group.add_argument(
        "--max-prompts",
        type=positive_int,
        default=absent,
        metavar="N",
        help="most prompts of one completion request (default: 128)",
    )
    group.add_argument(
        "--max-request-cost",
        type=positive_int,
        default=absent,
        metavar="N",
        help="most tokens that one request may ask for: its prompt and its longest answer, for each answer; a "
        "log-probability counts as four (default: 4194304)",
    )
    group.add_argument(
        "--responses-store",
        type=natural_int,
        default=absent,
        metavar="N",
        help="answers to /v1/responses that are kept in memory to be gone on with (default: 1000; 0 keeps none)",
    )
    group.add_argument(
        "--max-connections",
        type=positive_int,
        default=absent,
        metavar="N",
        help="most connections at once; further ones get a 503 (default: 16384)",
    )
    group.add_argument(
        "--max-connections-per-ip",
        type=positive_int,
        default=absent,
        metavar="N",
        help="most of them from one address (default: no bound; behind a proxy all have its address)",
    )
    group.add_argument(
        "--drain-s",
        type=float,
        default=absent,
        metavar="SECONDS",
        help="how long running answers may take to finish when stopping (default: 30)",
    )
    group.add_argument(
        "--engine-restarts",
        type=natural_int,
        default=absent,
        metavar="N",
        help="how often within five minutes an engine that died is started again, before the server ends (default: 3)",
    )
    group.add_argument(
        "--engine-hung-s",
        type=float,
        default=absent,
        metavar="SECONDS",
        help="an engine that says nothing, or ends no step, for so long is killed and counts as dead (default: 120)",
    )
    group.add_argument(
        "--audit-log",
        default=absent,
        metavar="FILE",
        help="write a JSON line for each request: who, what, how it ended; begun anew on SIGHUP and when it is moved",
    )
    group.add_argument(
        "--audit-content",
        action="store_true",
        default=absent,
        help="with prompts and answers in it",
    )
    group.add_argument(
        "--prompt-templates",
        default=absent,
        metavar="FILE",
        help="beginnings of chats to tokenise at the start, one JSON object with messages a line; found by all callers",
    )
    group.add_argument(
        "--raw-control-tokens",
        choices=("parse", "text"),
        default=absent,
        help="what <|im_end|> and the like are in raw prompts (/v1/completions, /tokenize): control tokens or plain "
        "text, which they always are in chats (default: parse)",
    )
    group.add_argument(
        "--otlp-endpoint",
        default=absent,
        metavar="URL",
        help="send traces and metrics to this OpenTelemetry collector, as http://127.0.0.1:4318 (default: what "
        "OTEL_EXPORTER_OTLP_ENDPOINT says; nothing is sent without either)",
    )
    group.add_argument(
        "--otlp-protocol",
        choices=("grpc", "http"),
        default=absent,
        help="how (default: what OTEL_EXPORTER_OTLP_PROTOCOL says, else http)",
    )
    group.add_argument(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default=absent,
        help="how the model writes tool calls (default: auto, what its chat template says; none refuses tools)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=absent,
        help="how it marks what it thinks before it answers (default: auto; none leaves it in the content)",
    )
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli.sources import server_config, settle
    from firsttoken.engine.launch import engine_process
    from firsttoken.engine.start_account import process_began_ns
    from firsttoken.server.listener import bind

    # Asks for a dump, once there is something to dump; until then it must not end the server, nor ever the engine,
    # which inherits this.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    settle(options, options.parser, os.environ)
    set_up_logging(options, LOG_LEVEL)
    _settle_flights(options)
    config, args = server_config(options), engine_args(options)
    templates = _prompt_templates(config.prompt_templates)
    with closing(bind(config)) as listener, engine_process(args) as handle:
        from firsttoken.server.run import serve

        return serve(config, listener, args, handle, process_began_ns(), templates)


def _settle_flights(options: argparse.Namespace) -> None:
    """The folder of the flight recorder is made and tried. Raises `ConfigError` for one that was asked for; the usual
    one may be missing: then a warning says so."""
    asked = getattr(options, "flight_dir", None)
    if asked == NO_FOLDER:
        return
    folder = flight_folder() if asked is None else Path(asked)
    if folder is None:
        return
    options.flight_dir = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tried = folder / f".tried-{os.getpid()}"
        os.close(os.open(tried, os.O_WRONLY | os.O_CREAT, 0o600))
        tried.unlink()
    except OSError as error:
        why = f"cannot write to {folder}: {error.strerror or error}"
        if asked is not None:
            raise ConfigError(f"--flight-dir: {why}; name another folder, or none") from None
        log.warning("flight recorder: %s, so nothing will be kept; --flight-dir names another folder, or none", why)


def flight_folder() -> Path | None:
    """``$XDG_STATE_HOME/firsttoken/flights``, else ``~/.local/state/...``; None for a user without a home."""
    if xdg := os.environ.get("XDG_STATE_HOME"):
        return Path(xdg).expanduser() / "firsttoken" / "flights"
    try:
        return Path.home() / ".local" / "state" / "firsttoken" / "flights"
    except RuntimeError:
        return None


def _prompt_templates(path: str | None) -> tuple[PromptTemplate, ...]:
    """What the file says. Read before the engine is launched, so that a mistake is told at once."""
    if path is None:
        return ()
    from firsttoken.text.prompt_templates import read_prompt_templates

    return read_prompt_templates(path)
