"""``firsttoken bench compare``: did a change make it slower?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.cli.bench_options import share

if TYPE_CHECKING:
    from firsttoken.bench.compare import Comparison

NAME = "compare"
HELP = "compare two results, or two folders of them; exit code 1 when a figure got worse"
EPILOG = """\
Medians and rates are compared, and what --metric names. A figure that only the old result has is a failure too.

examples:
  firsttoken bench compare before.json after.json
  firsttoken bench compare benchmarks/results/h200 new --tolerance 5% --metric ttft_ms.p99
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", type=Path, help="a result, or a folder of them")
    parser.add_argument("new", metavar="NEW", type=Path, help="the same, measured later")
    parser.add_argument(
        "--tolerance", type=share, default=0.03, metavar="SHARE", help="how much worse is no regression (default: 3%%)"
    )
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="compare this too, as in itl_ms.p99 (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")


def run(options: argparse.Namespace) -> int:
    from firsttoken.bench.compare import compare

    found = compare(options.old, options.new, options.tolerance, options.metric)
    if options.json:
        print(json.dumps([comparison.as_dict() for comparison in found]))
    else:
        for line in _lines(found):
            print(line)
    return 1 if any(comparison.failed for comparison in found) else 0


def _lines(found: list[Comparison]) -> list[str]:
    width = max(len(comparison.case) for comparison in found)
    lines = [f"{'case':<{width}}{'old':>12}{'new':>12}{'new/old':>9}  verdict"]
    for one in found:
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        lines.append(f"{one.case:<{width}}{_number(one.old):>12}{_number(one.new):>12}{ratio:>9}  {one.verdict}")
    worse = sum(comparison.failed for comparison in found)
    lines.append(f"{len(found)} figures, {worse} worse or missing")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
