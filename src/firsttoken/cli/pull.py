"""``firsttoken pull``: fetch a model into the cache, so that it starts at once and offline afterwards."""

from __future__ import annotations

import argparse
import json

from firsttoken.core.engine_args import DEFAULT_MODEL

NAME = "pull"
HELP = "fetch a model into the cache"
EPILOG = """\
The cache is $FIRSTTOKEN_CACHE, else $XDG_CACHE_HOME/firsttoken, else ~/.cache/firsttoken.

examples:
  firsttoken pull                           the default model (94 MB)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=DEFAULT_MODEL, help=f"an alias (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    from firsttoken.checkpoint.pull import pull
    from firsttoken.cli import report
    from firsttoken.cli.progress import transfer_progress

    with transfer_progress() as update:
        path = pull(options.model, on_progress=update)
    if options.json:
        print(json.dumps(report.header(model=options.model, path=str(path), bytes=path.stat().st_size)))
    else:
        print(f"{options.model} is at {path}")
    return 0
