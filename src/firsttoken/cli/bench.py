"""``firsttoken bench``: its measurements, one file each."""

from __future__ import annotations

import argparse

from firsttoken.cli import bench_compare, bench_latency, bench_layout, bench_load, bench_steps
from firsttoken.cli.options import HelpFormatter

NAME = "bench"
HELP = "measure latency, load, single steps and memory layouts, and compare results"
EPILOG = """\
examples:
  firsttoken bench latency MODEL --batch 8 --input 512 --output 128
  firsttoken bench load MODEL --rate 20 --seconds 12
  firsttoken bench load http://127.0.0.1:8000 --concurrency 64
  firsttoken bench compare before.json after.json
  firsttoken bench WHAT --help
"""

PARTS = (bench_latency, bench_load, bench_steps, bench_layout, bench_compare)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(title="measurements", dest="measurement", metavar="WHAT", required=True)
    for part in PARTS:
        sub = parts.add_parser(
            part.NAME,
            help=part.HELP,
            description=part.HELP[0].upper() + part.HELP[1:] + ".",
            epilog=getattr(part, "EPILOG", None),
            formatter_class=HelpFormatter,
        )
        part.add_arguments(sub)
        sub.set_defaults(measure=part.run, parser=sub)


def run(options: argparse.Namespace) -> int:
    measured: int = options.measure(options)
    return measured
