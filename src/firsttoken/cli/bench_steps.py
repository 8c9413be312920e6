"""``firsttoken bench steps``: how long single steps take, over a grid of tokens, rows and contexts."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from firsttoken.cli.bench_options import add_model, add_results, hand_in, say
from firsttoken.cli.options import engine_args, positive_int, whole_int

NAME = "steps"
HELP = "a table of single steps: tokens x rows x context -> ms"
EPILOG = """\
The steps run straight on the executor, one by one: no scheduler, no transport. A cell of the grid that does not
fit (the model's length, memory, the --max options) is left out.

examples:
  firsttoken bench steps random:llama-3.1-8b --output benchmarks/results/h200/steps.json
  firsttoken bench steps random:smollm2-135m --max-rows 8 --max-context 1024 --max-prefill 512
"""

# A CPU takes minutes to fill what a GPU fills in seconds.
CPU_DEFAULTS = {"max_rows": 8, "max_context": 1024, "max_prefill": 512}
DEFAULTS = {"max_rows": 64, "max_context": 8192, "max_prefill": 8192}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=positive_int, default=5, metavar="N", help="steps of each cell (default: 5)")
    for name, what in (("rows", "decode rows"), ("context", "tokens of context"), ("prefill", "prompt tokens")):
        key = f"max_{name}"
        parser.add_argument(
            f"--max-{name}",
            type=positive_int,
            metavar="N",
            help=f"most {what} in a step (default: {DEFAULTS[key]}; on a CPU {CPU_DEFAULTS[key]})",
        )
    parser.add_argument("--seed", type=whole_int, default=0, metavar="N", help="chooses the tokens (default: 0)")
    add_results(parser, "--output")
    add_model(parser)


def run(options: argparse.Namespace) -> int:
    from firsttoken.bench.steps import StepsConfig, measure_steps, open_executor
    from firsttoken.cli import report

    args = engine_args(options)
    given = {name: getattr(options, name) for name in DEFAULTS if getattr(options, name) is not None}
    limits = {**(CPU_DEFAULTS if _computes_on_cpu(args.device) else DEFAULTS), **given}
    config = StepsConfig(repeat=options.repeat, seed=options.seed, **limits)
    try:
        engine = open_executor(args, config)
    except KeyboardInterrupt:
        # Its thread still loads. Python would end that on the way out, in the midst of C++ code, and that aborts.
        os._exit(128 + signal.SIGINT)
    try:
        rows = measure_steps(engine, config, say)
    finally:
        engine.executor.close()
    if engine.info["device"] == "cpu":
        engine.info["device_name"] = report.cpu_name()
    result = {
        **report.header(**engine.info, repeat=config.repeat, seed=config.seed),
        **limits,
        "steps": rows,
    }
    hand_in(options, result, _lines(result))
    return 0


def _computes_on_cpu(device: str) -> bool:
    from firsttoken.devices.registry import choose_device, known_devices

    return choose_device(device, known_devices())[0].kind == "cpu"


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['model']} on {result['device_name']}: {len(result['steps'])} steps, medians of {result['repeat']}",
        f"{'kind':<8}{'decode':>7}{'context':>9}{'prompt':>8}{'from':>7}{'ms':>11}{'sampling':>10}",
    ]
    lines += [
        f"{row['kind']:<8}{row['decode_rows']:>7}{row['context']:>9}{row['prefill_tokens']:>8}"
        f"{row['prefill_start']:>7}{row['ms']:>11.3f}{row['sample_ms']:>10.3f}"
        for row in result["steps"]
    ]
    return lines
