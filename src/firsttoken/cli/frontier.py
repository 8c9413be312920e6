"""``firsttoken frontier``: goodput against latency as the load rises, for policies and batch windows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.cli.bench_load import DEFAULT_MIX
from firsttoken.cli.bench_options import add_results, positive_number, say, write_result
from firsttoken.cli.options import whole_int
from firsttoken.cli.simulate_options import (
    add_engine,
    add_targets,
    engine_head,
    engine_line,
    engine_shape,
    find_gpu,
    find_mix,
    find_targets,
    number_list,
    targets_head,
)
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.simulate.frontier import Point

NAME = "frontier"
HELP = "goodput against latency as the load rises, for policies and batch windows (simulated)"
DEFAULT_RATES = "5,10,20,30,40,50"
DEFAULT_WINDOWS = "0,5,10,20,50,adaptive,predicted"
DEFAULT_TTFT_MS, DEFAULT_ITL_MS = 1000.0, 50.0
EPILOG = """\
Each pair of a policy and a window serves Poisson loads in the simulator (firsttoken simulate --help names them).
Goodput counts requests whose first token and 99 % of whose gaps keep their targets: 1 s and 50 ms if none is given.
--json prints a list, one entry a point; --output writes an object that says besides what was simulated.

examples:
  firsttoken frontier --png frontier.png
  firsttoken frontier --rates 10,20,30,40 --policies default,fcfs-2048 --windows 0 --target-ttft 500ms --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates", type=number_list, default=DEFAULT_RATES, metavar="R,..", help=f"(default: {DEFAULT_RATES})"
    )
    parser.add_argument("--policies", default="default", metavar="NAME,..", help="(default: default)")
    parser.add_argument(
        "--windows", default=DEFAULT_WINDOWS, metavar="MS|NAME,..", help=f"(default: {DEFAULT_WINDOWS})"
    )
    parser.add_argument("--mix", metavar="IN,..:OUT,..", help=f"lengths (default: {DEFAULT_MIX})")
    parser.add_argument("--seed", type=whole_int, default=1, metavar="N", help="of arrivals and lengths (default: 1)")
    parser.add_argument(
        "--seconds", type=positive_number, default=60.0, metavar="S", help="how long each load lasts (default: 60)"
    )
    add_targets(parser)
    add_engine(parser)
    add_results(parser, "--output")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the frontier")


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report
    from firsttoken.devices.cuda import POLICY
    from firsttoken.simulate.frontier import measure
    from firsttoken.simulate.frontier_picture import draw_frontier
    from firsttoken.simulate.policies import find_policy
    from firsttoken.simulate.workload import poisson_jobs

    if options.targets is None and options.target_ttft is None and options.target_itl is None:
        options.target_ttft, options.target_itl = DEFAULT_TTFT_MS, DEFAULT_ITL_MS
    mix, targets = find_mix(options.mix), find_targets(options)
    gpu = find_gpu(options)
    engine = engine_shape(options, gpu)
    loads = [(rate, poisson_jobs(rate, options.seconds, mix, options.seed)) for rate in options.rates]
    if not all(jobs for _, jobs in loads):
        raise ConfigError(f"a rate for {options.seconds:g} s is no request at all: raise one of them")
    points: list[Point] = []
    for name in options.policies.split(","):
        for window in options.windows.split(","):
            say(f"{name}, window {window}")
            for rate, jobs in loads:
                policy = find_policy(name, POLICY.budget, gpu.alone)  # a new one: it may learn
                points.append(measure(policy, window, jobs, rate, engine, gpu.step_time, targets))
    head = report.header(
        **engine_head(gpu, engine),
        mix=str(mix),
        seed=options.seed,
        seconds=options.seconds,
        targets=targets_head(options),
    )
    title = f"{head['model']} on {head['device_name']}, simulated: mix {mix}, seed {options.seed}"
    if options.png is not None:
        draw_frontier(options.png, title, points)
    entries = [point._asdict() for point in points]
    if options.output_json is not None:
        write_result(options.output_json, {**head, "points": entries})
    if options.json:
        print(json.dumps(entries))
    else:
        for line in [title, engine_line(head, gpu.error), *_lines(points)]:
            print(line)
    return 0


def _lines(points: list[Point]) -> list[str]:
    from firsttoken.simulate.frontier import pareto

    front = set(pareto(points))
    width = max(len(point.policy) for point in points) + 2
    lines = [f"{'':<{width}}{'offered/s':>10}{'goodput/s':>11}{'TTFT p99':>10}{'ITL p99':>9}  (ms)"]
    lines += [
        f"{point.policy:<{width}}{point.offered_rps:>10g}{point.goodput_rps:>11.2f}{point.ttft_p99_ms:>10.1f}"
        f"{point.itl_p99_ms:>9.1f}{'  on the frontier' if point in front else ''}"
        for point in points
    ]
    return lines
