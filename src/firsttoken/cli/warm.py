"""``firsttoken warm``: compile a model's GPU kernels ahead, so that engines start without compiling."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.cli.options import add_engine_options, add_log_level, add_model_argument, engine_args, positive_int
from firsttoken.core.errors import ConfigError, FirstTokenError

if TYPE_CHECKING:
    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.executor.ahead.gpus import GPU
    from firsttoken.executor.ahead.messages import Order, Progress

NAME = "warm"
HELP = "compile a model's GPU kernels ahead, for a GPU that need not be here"
EPILOG = """\
Kernels go to Triton's cache: $TRITON_CACHE_DIR, else ~/.triton/cache. They serve engines of the same model, options,
GPU and versions; a cache that is moved must stay at the same path.

examples:
  firsttoken warm random:llama-3.1-8b               for the GPU of this machine
  firsttoken warm ./model --gpu h200                for an H200, on any machine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help="h200, h100, a100, l40s, l4, a10g, rtx-4090, or sm80 to sm90 (default: the one here)",
    )
    parser.add_argument(
        "--processes",
        type=positive_int,
        metavar="N",
        help="that compile at the same time (default: one a core, 16 at most)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_options(
        parser,
        without=(
            "device",
            "dtype",
            "quantization",
            "served_model_name",
            "threads",
            "engine_core",
            "seed",
            "targets",
            "chat_template",
        ),
    )
    add_log_level(parser, "warning")


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report

    began = time.monotonic()
    args = engine_args(options)
    order = _order(args, _gpu(options.gpu), options.processes)
    progress, folder = _compile(order)
    seconds = time.monotonic() - began
    if options.json:
        figures = {
            "gpu": order.gpu.name,
            "kernels": progress.total,
            "failed": progress.failed,
            "seconds": round(seconds, 2),
            "cache": str(folder),
        }
        print(json.dumps(report.header(model=args.model) | figures))
    else:
        print(f"{progress.done} kernels and launchers for {order.gpu.name} are in {folder} ({seconds:.1f} s)")
    for failure in progress.failed:
        print(f"firsttoken warm: error: {failure}", file=sys.stderr)
    return 1 if progress.failed else 0


def _gpu(name: str | None) -> GPU:
    from firsttoken.executor.ahead.gpus import known_gpu

    if name is not None:
        return known_gpu(name)
    from firsttoken.devices.cuda import CUDADevice, present_gpu

    refusal = CUDADevice().refusal()
    if refusal is not None:
        why = refusal.partition(";")[0]  # what follows is advice for a command that computes
        raise ConfigError(f"there is no GPU here to compile for ({why}): name one by --gpu")
    return present_gpu()


def _order(args: EngineArgs, gpu: GPU, processes: int | None) -> Order:
    """What an engine with these options would order."""
    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.devices.cuda import PlannedGPU
    from firsttoken.engine.resolve import resolve
    from firsttoken.executor.ahead.client import spare_processes
    from firsttoken.executor.ahead.messages import Order

    checkpoint = open_checkpoint(args.model, offline=args.offline, revision=args.revision)
    _, config = resolve(args, checkpoint, [PlannedGPU(gpu)])
    return Order(
        model=checkpoint.config,
        executor=config.executor,
        gpu=gpu,
        processes=processes or spare_processes(),
        quietly=False,
    )


def _compile(order: Order) -> tuple[Progress, Path]:
    from firsttoken.cli.progress import count_progress
    from firsttoken.executor.ahead.client import AheadCompiler
    from firsttoken.executor.ahead.marks import cache_folder

    compiler = AheadCompiler()
    try:
        compiler.order(order)
        while compiler.alive and not compiler.progress.total:
            compiler.poll(1.0)
        with count_progress(f"compiling for {order.gpu.name}", compiler.progress.total) as update:
            while compiler.alive:
                update(compiler.progress.done, "kernels and launchers")
                compiler.poll(1.0)
            update(compiler.progress.done, "kernels and launchers")
    finally:
        compiler.close()
    if not compiler.progress.finished:
        raise FirstTokenError("the process that compiles has ended early: its own messages say why")
    return compiler.progress, cache_folder()
