"""``firsttoken pull``: fetch a model into the cache, so that it starts at once and offline afterwards."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING

from firsttoken.cli.options import add_revision
from firsttoken.core.engine_args import DEFAULT_MODEL

if TYPE_CHECKING:
    from firsttoken.checkpoint.progress import OnProgress

NAME = "pull"
HELP = "fetch a model into the cache, and check it"
EPILOG = """\
An alias is checked against its SHA-256 each time. A file or folder that is here already is only looked at.
The cache is $FIRSTTOKEN_CACHE, else $XDG_CACHE_HOME/firsttoken, else ~/.cache/firsttoken.

examples:
  firsttoken pull                           the default model (94 MB)
  firsttoken pull org/model                 a repository of the hub
  firsttoken pull org/model --revision v2   its branch, tag or commit of that name
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=DEFAULT_MODEL, help=f"what to fetch (default: {DEFAULT_MODEL})"
    )
    add_revision(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report
    from firsttoken.cli.progress import transfer_progress

    # As Ctrl-C: pip is ended and what was half fetched removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with transfer_progress() as on_progress:
        path = _fetch(options.model, options.revision, on_progress)
    if options.json:
        print(json.dumps(report.header(model=options.model, path=path)))
    elif path is None:
        print(f"{options.model} needs no file")
    else:
        print(f"{options.model} is at {path}")
    return 0


def _fetch(model: str, revision: str | None, on_progress: OnProgress) -> str | None:
    """Where the model lies; None for one that is made, not read."""
    from firsttoken.checkpoint.aliases import ALIASES
    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.checkpoint.pull import pull

    if model in ALIASES and revision is None:
        return str(pull(model, on_progress=on_progress))
    checkpoint = open_checkpoint(model, on_progress=on_progress, revision=revision)
    return None if checkpoint.source == "random" else checkpoint.path
