"""``firsttoken bench layout``: the bandwidth of memory layouts, and which of them the engine chooses."""

from __future__ import annotations

import argparse
from typing import Any

from firsttoken.cli.bench_options import add_results, hand_in, positive_number, say
from firsttoken.cli.options import add_log_level, size

NAME = "layout"
HELP = "bandwidth of layouts of the KV cache, of weights and of convolution inputs"
EPILOG = """\
Each tensor is read as its consumer reads it, in every layout. The share is of the device's read roof where that
was measured before, else of a plain copy measured in the same run (which a layout may beat: reading is faster).

examples:
  firsttoken bench layout
  firsttoken bench layout --device cuda --output-json benchmarks/results/h200/layout.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="type of the elements (default: bfloat16)"
    )
    parser.add_argument(
        "--size", type=size, metavar="SIZE", help="what each case reads (default: 512MiB, on a CPU 128MiB)"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=0.3, metavar="S", help="time for each case (default: 0.3)"
    )
    add_results(parser)
    add_log_level(parser, "warning")


def run(options: argparse.Namespace) -> int:
    from firsttoken.bench.layouts.measure import LayoutConfig, measure_layouts
    from firsttoken.cli import report

    config = LayoutConfig(device=options.device, dtype=options.dtype, nbytes=options.size, seconds=options.seconds)
    figures = measure_layouts(config, say=say)
    if figures["device"] == "cpu":
        figures["device_name"] = report.cpu_name()
    result = {**report.header(), **figures}
    hand_in(options, result, _lines(result))
    return 0


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['device_name']}, {result['dtype']}; peak {result['peak_gb_s']:,.0f} GB/s ({result['peak_source']})",
        f"{'tensor':<26}{'layout':<20}{'GB/s':>10}{'of peak':>10}",
    ]
    chosen = {(one["tensor"], one["layout"]) for one in result["chosen"]}
    for row in result["layouts"]:
        mark = "  <- chosen" if (row["tensor"], row["layout"]) in chosen else ""
        lines.append(f"{row['tensor']:<26}{row['layout']:<20}{row['gb_s']:>10,.1f}{row['share_of_peak']:>10.0%}{mark}")
    return lines
