"""What the measurements of ``firsttoken bench`` share on the command line, and how they hand in their results."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from firsttoken.cli.options import add_engine_options, add_log_level, add_model_argument
from firsttoken.cli.streams import is_terminal
from firsttoken.core.duration import milliseconds
from firsttoken.core.errors import ConfigError

T = TypeVar("T")


def duration_ms(text: str) -> float:
    """Milliseconds from ``80ms``, ``1.5s`` or ``500us``."""
    try:
        return milliseconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share(text: str) -> float:
    """A share from ``3%`` or ``0.03``."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a share: write it as in 3% or 0.03")
    return value


def positive_number(text: str) -> float:
    """A number above 0."""
    return _number(text, "above 0", lambda value: value > 0)


def natural_number(text: str) -> float:
    """A number, 0 or more."""
    return _number(text, "of 0 or more", lambda value: value >= 0)


def _number(text: str, which: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (fits(value) and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number {which}")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL and the engine's options; ``--seed`` is the measurement's own."""
    add_model_argument(parser)
    add_log_level(parser, "warning")
    add_engine_options(parser, without=("served_model_name", "seed"))


def add_results(parser: argparse.ArgumentParser, flag: str = "--output-json") -> None:
    """``--json`` and a file for the same object."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(flag, dest="output_json", type=Path, metavar="FILE", help="write the JSON object to this file")


def hand_in(options: argparse.Namespace, result: Any, lines: Iterable[str]) -> None:
    """Write the result where it was asked for: the file, and on stdout as JSON or as ``lines`` for people.

    Raises `ConfigError` for a file that cannot be written.
    """
    if options.output_json is not None:
        write_result(options.output_json, result)
    if options.json:
        print(json.dumps(result))
    else:
        for line in lines:
            print(line)


def write_result(path: Path, result: Any) -> None:
    """As JSON. Raises `ConfigError` for a file that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def say(text: str) -> None:
    """Progress, for people, on stderr: only where one is looking."""
    if is_terminal(sys.stderr):
        print(text, file=sys.stderr)


def percentile_lines(result: dict[str, Any]) -> list[str]:
    """A small table of the percentile objects in ms that ``result`` has."""
    lines = [_columns(["ms", "p50", "p90", "p99", "max", "mean"])]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if found := result.get(name):
            cells = [f"{found[key]:.2f}" for key in ("p50", "p90", "p99", "max", "mean")]
            lines.append(_columns([name.removesuffix("_ms").upper(), *cells]))
    if stages := result.get("stages_ms"):
        medians = ", ".join(f"{name} {found['p50']:.2f}" for name, found in stages.items())
        lines.append(f"median of each stage (ms): {medians}")
    return lines


def start_line(result: dict[str, Any]) -> str:
    """The start and its parts."""
    parts = ", ".join(f"{name} {ms:.0f}" for name, ms in result["start_ms"].items())
    return f"start to first token {result['start_s']:.2f} s (ms: {parts})"


def memory_line(result: dict[str, Any]) -> str:
    memory = result["peak_memory_gib"]
    return "peak memory unknown" if memory is None else f"peak memory {memory:.2f} GiB"


def _columns(cells: Sequence[str]) -> str:
    return f"{cells[0]:<6}" + "".join(f"{cell:>11}" for cell in cells[1:])


def run_async(work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run ``work(*args)`` on the loop that serves in production; it is called once there is one."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work(*args))
