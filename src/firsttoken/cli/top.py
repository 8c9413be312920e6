"""``firsttoken top``: a running server, live in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from firsttoken.cli.bench_options import duration_ms
from firsttoken.cli.streams import is_terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from firsttoken.cli.top_feed import LiveFeed
    from firsttoken.cli.top_state import LiveState

NAME = "top"
HELP = "latency, queue, batch, KV and steps of a running server, live in this terminal"
EPILOG = """\
Shows what the server's /dashboard shows, from the same feed. Ctrl-C leaves. A server that is not there, or no longer,
is asked again and again. Where stdout is no terminal it prints one picture and ends, as with --once.
Steps that were "held up": the engine's loop waited for a processor, or collected garbage, in that part of the line.

examples:
  firsttoken top http://127.0.0.1:8000
  firsttoken top http://gpu7:8000 --api-key "$KEY" --interval 250ms
  firsttoken top http://127.0.0.1:8000 --json
"""
_SHORTEST_MS, _LONGEST_MS = 100.0, 10_000.0
# Rates are between two looks: so far apart they are when only one picture is asked for.
_ONCE_S = 1.0
# Where there is no terminal whose width would count: room for every part of the picture.
_FILE_WIDTH = 160
# What figures raise that are none: a frame has its names, and what is behind them is anybody's guess.
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_RETRY_S, _LONGEST_RETRY_S = 1.0, 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address, with or without /v1")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--ca-file", metavar="FILE", help="with https: trust the certificates in this file (PEM) alone")
    parser.add_argument("--interval", type=_interval, default=1000.0, metavar="TIME", help="100ms to 10s (default: 1s)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and end")


def _interval(text: str) -> float:
    """Raises ``ArgumentTypeError``."""
    try:
        milliseconds = duration_ms(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a time from 100ms to 10s: write it as in 250ms"
        ) from None
    if not _SHORTEST_MS <= milliseconds <= _LONGEST_MS:
        raise argparse.ArgumentTypeError(f"must be from 100ms to 10s, got {text!r:.80}")
    return milliseconds


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli.top_feed import LiveFeed
    from firsttoken.cli.top_state import LiveState

    once = options.json or options.once or not is_terminal(sys.stdout)
    hz = 10.0 if once else 1e3 / options.interval
    feed = LiveFeed(options.url, options.api_key, hz=hz, ca_file=options.ca_file)
    state = LiveState()
    return _once(feed, state, as_json=options.json) if once else _live(feed, state)


def _once(feed: LiveFeed, state: LiveState, *, as_json: bool) -> int:
    from rich.console import Console

    end = time.monotonic() + _ONCE_S
    for _ in _states(feed, state):
        if time.monotonic() >= end:
            break
    if as_json:
        print(json.dumps(state.summary(feed.base)))
    else:
        console = Console(highlight=False)
        if not (console.is_terminal or os.environ.get("COLUMNS")):  # which rich takes for 80 columns
            console.width = _FILE_WIDTH
        console.print(_picture(feed, state, console.width, None, None))
    return 0


def _states(feed: LiveFeed, state: LiveState) -> Iterator[None]:
    """``state`` after each frame. Raises what `LiveFeed.frames` raises."""
    with contextlib.closing(feed.frames()) as frames:
        for frame in frames:
            try:
                state.add(frame)
            except _NONSENSE:
                raise feed.other_kind() from None
            yield


def _picture(feed: LiveFeed, state: LiveState, width: int, height: int | None, trouble: str | None) -> RenderableType:
    from firsttoken.cli.top_screen import picture

    try:
        return picture(state, width, height, trouble)
    except _NONSENSE:
        raise feed.other_kind() from None


def _live(feed: LiveFeed, state: LiveState) -> int:
    from rich.console import Console
    from rich.live import Live

    from firsttoken.cli.top_feed import FeedLost

    console = Console(highlight=False)
    wait = _RETRY_S
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:

        def show(trouble: str | None) -> None:
            live.update(_picture(feed, state, console.width, console.height, trouble), refresh=True)

        while True:
            try:
                for _ in _states(feed, state):
                    show(None)
                    wait = _RETRY_S
                why = "the server ended the stream"
            except FeedLost as lost:
                why = str(lost)
            end = time.monotonic() + wait
            while (left := end - time.monotonic()) > 0:
                show(f"trying again in {left:.0f} s: {why}")
                time.sleep(min(left, 0.5))
            wait = min(wait * 2, _LONGEST_RETRY_S)
