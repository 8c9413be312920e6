"""``firsttoken bench load URL``: the options that only a server's URL takes, and its measuring."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import duration_ms, run_async, say
from firsttoken.core.address import how_to_write, lacks_scheme
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.bench.shape import Load

DEFAULT_TIMEOUT_MS = 120_000.0
# By the flag's name: where argparse puts it, and what it is when not given.
_SERVER_OPTIONS: dict[str, tuple[str, Any]] = {
    "--model": ("served_model", None),
    "--chat": ("chat", False),
    "--text": ("text", False),
    "--api-key": ("caller_key", None),
    "--timeout": ("timeout", None),
    "--ca-file": ("ca_file", None),
    "--insecure": ("insecure", False),
    "--prompt-seed": ("prompt_seed", None),
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a server's URL in place of MODEL")
    group.add_argument("--model", dest="served_model", metavar="NAME", help="left out, the one that it serves")
    group.add_argument("--chat", action="store_true", help="by /v1/chat/completions (default: /v1/completions)")
    group.add_argument("--text", action="store_true", help="prompts of words where token ids would be taken too")
    group.add_argument("--api-key", dest="caller_key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--timeout", type=duration_ms, metavar="TIME", help="for a whole request, as in 30s (default: 2min)"
    )
    group.add_argument("--ca-file", metavar="FILE", help="with https: trust the certificates in this file (PEM) alone")
    group.add_argument("--insecure", action="store_true", help="with https: do not check the certificate")
    group.add_argument(
        "--prompt-seed", metavar="TEXT", help="of the prompts (default: other ones each time, as servers keep prefixes)"
    )


def is_url(options: argparse.Namespace) -> bool:
    """Whether the MODEL that was given is a server's. Raises `ConfigError` for one that would be but for its scheme."""
    model = str(getattr(options, "model", ""))
    if lacks_scheme(model):
        raise ConfigError(f"{model!r:.200} is no model, and no server's URL: {how_to_write(model, '')}")
    return model.startswith(("http://", "https://"))


def refuse_server_options(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for an option that an engine does not have."""
    for flag, (name, default) in _SERVER_OPTIONS.items():
        if getattr(options, name) != default:
            raise ConfigError(f"{flag} is for a server's URL: leave it out, or give a URL in place of the model")


def measure_url(options: argparse.Namespace, load: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The head of the result, and a result for each rate. Raises `ConfigError`, `BenchFailed`."""
    from firsttoken.bench.http.overhead import allow_open_files
    from firsttoken.bench.shape import Load

    given = [name for name in EngineArgs.__struct_fields__ if name not in ("model", "seed") and hasattr(options, name)]
    given += [name for name in ("prepare", "beside") if getattr(options, name)]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(f"{flag} is for an engine that bench load starts itself: leave it out with a server's URL")
    allow_open_files()
    return run_async(_measure, options, Load(**load))


async def _measure(options: argparse.Namespace, load: Load) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from firsttoken.bench.http.load import measure_http
    from firsttoken.bench.http.server import find_server
    from firsttoken.bench.http.target import Target
    from firsttoken.bench.repeats import measure_all
    from firsttoken.cli import report
    from firsttoken.cli.bench_load import load_head

    prompts = secrets.token_hex(4) if options.prompt_seed is None else options.prompt_seed
    server = await find_server(
        Target.parse(options.model, verify=not options.insecure, ca_file=options.ca_file),
        model=options.served_model,
        chat=options.chat,
        text=options.text,
        api_key=options.caller_key,
        timeout_s=(options.timeout or DEFAULT_TIMEOUT_MS) / 1e3,
    )
    try:

        async def measure(one: Load, number: int) -> dict[str, Any]:
            return await measure_http(server, one, f"{prompts} {number}", say)

        results = await measure_all(measure, load, options.rates or (), options.repeat)
    finally:
        server.pool.close()
    head = report.header(
        command=_command(options.caller_key),
        url=server.target.url,
        route=server.dialect.route,
        model=server.dialect.model,
        prompts=server.prompts,
        prompt_seed=prompts,
        fields=server.dialect.fields,
        **load_head(options, vars(load)),
    )
    return head, results


def _command(key: str | None) -> str:
    """This process's own, without the key."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if key is not None:
        words = ["***" if word == key else word.replace(f"={key}", "=***") for word in words]
    return " ".join(words)
