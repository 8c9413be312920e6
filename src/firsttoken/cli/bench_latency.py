"""``firsttoken bench latency``: time to first token and between tokens of batches of equal requests."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import (
    add_model,
    add_results,
    hand_in,
    memory_line,
    natural_number,
    percentile_lines,
    run_async,
    say,
    start_line,
)
from firsttoken.cli.options import engine_args, natural_int, positive_int, whole_int

if TYPE_CHECKING:
    from firsttoken.bench.latency import LatencyConfig
    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.transport.channel import LaunchedEngine

NAME = "latency"
HELP = "time to first token and between tokens, of batches of equal requests"
EPILOG = """\
All requests of a batch are sent at once, and the next batch when all have ended. Prompts are random and
decoding is greedy past any end token. TPOT is (last - first token) / (tokens - 1) of a request, ITL each gap.

examples:
  firsttoken bench latency
  firsttoken bench latency random:llama-3.1-8b --input 2048 --output 128 --json
  firsttoken bench latency random:llama-3.2-1b --batch 64 --output-json results/1b_batch64.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive_int, default=1, metavar="N", help="requests at once (default: 1)")
    parser.add_argument(
        "--input", type=positive_int, default=512, metavar="TOKENS", help="length of each prompt (default: 512)"
    )
    parser.add_argument(
        "--output", type=positive_int, default=128, metavar="TOKENS", help="length of each answer (default: 128)"
    )
    parser.add_argument("--repeat", type=positive_int, default=5, metavar="N", help="measured batches (default: 5)")
    parser.add_argument("--warmup", type=natural_int, default=1, metavar="N", help="batches before those (default: 1)")
    parser.add_argument(
        "--prepare", type=natural_number, default=60.0, metavar="S",
        help="how long the idle engine may capture its steps before that (default: 60, mostly done in less)",
    )  # fmt: skip
    parser.add_argument("--seed", type=whole_int, default=0, metavar="N", help="chooses the prompts (default: 0)")
    add_results(parser)
    add_model(parser)


def run(options: argparse.Namespace) -> int:
    import msgspec

    from firsttoken.engine.launch import engine_process

    args = engine_args(options)
    if not hasattr(options, "max_num_seqs"):
        args = msgspec.structs.replace(args, max_num_seqs=max(args.max_num_seqs, options.batch))
    with engine_process(args) as handle:
        from firsttoken.bench.latency import LatencyConfig

        config = LatencyConfig(
            batch=options.batch,
            input=options.input,
            output=options.output,
            repeat=options.repeat,
            warmup=options.warmup,
            seed=options.seed,
            prepare_s=options.prepare,
        )
        result = run_async(_measure, args, handle, config)
    hand_in(options, result, _lines(result))
    return 0


async def _measure(args: EngineArgs, handle: LaunchedEngine, config: LatencyConfig) -> dict[str, Any]:
    from firsttoken.bench.latency import bandwidth, measure_latency
    from firsttoken.bench.session import open_session
    from firsttoken.cli import report
    from firsttoken.engine.start_account import process_began_ns

    async with open_session(args, process_began_ns(), handle) as session:
        figures = await measure_latency(session, config, say)
        figures |= bandwidth(session, config, args, figures["tpot_ms"].get("p50"))
        head = report.header(
            session.llm.info,
            batch=config.batch,
            input=config.input,
            output=config.output,
            repeat=config.repeat,
            seed=config.seed,
        )
    return {**head, **figures}


def _lines(result: dict[str, Any]) -> list[str]:
    where = result.get("device_name") or result["device"]
    lines = [
        f"{result['model']} on {where}: {result['dtype']}, quantization {result['quantization']}, KV "
        f"{result['kv_dtype']}; {result['batch']} x ({result['input']} + {result['output']}) tokens, "
        f"{result['repeat']} times",
        *percentile_lines(result),
        f"{result['tokens_per_s']:,.1f} tokens/s; by the median E2E {result['tokens_per_s_median']:,.1f} tokens/s, "
        f"{result['requests_per_s_median']:,.2f} requests/s",
    ]
    if result["achieved_gb_s"] is not None:
        read = f"a decode step reads {result['read_bytes_per_step'] / 1e9:.3f} GB: {result['achieved_gb_s']:,.0f} GB/s"
        of_roof = "" if result["roof_share"] is None else f", {result['roof_share']:.0%} of the roof"
        lines.append(read + of_roof)
    if result["host_us_per_step"] is not None:
        lines.append(f"host CPU time of a decode step {result['host_us_per_step']:.0f} us")
    if result["captured_share"]:
        lines.append(f"{result['captured_share']:.1%} of the steps were launched as a graph")
    return [*lines, memory_line(result), start_line(result)]
