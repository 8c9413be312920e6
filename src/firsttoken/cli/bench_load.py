"""``firsttoken bench load``: latency and goodput under requests that arrive by themselves."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import (
    add_model,
    add_results,
    duration_ms,
    hand_in,
    memory_line,
    natural_number,
    percentile_lines,
    positive_number,
    run_async,
    say,
    start_line,
)
from firsttoken.cli.options import engine_args, positive_int, whole_int
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.bench.load import LoadConfig
    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.transport.channel import LaunchedEngine

NAME = "load"
HELP = "latency and goodput under requests that arrive by themselves"
DEFAULT_MIX = "64,256,512,2048:16,64,128"
EPILOG = """\
With --rate, rate x seconds requests arrive at random (Poisson). The draws, for each in this order, of Python's
random.Random(seed): expovariate(rate), the input's length, the output's. A request counts as good when its
first token came within --target-ttft and 99 % of its gaps are within --target-itl. The exit code is 1 when the
p99 over all misses a stated target, or when a request failed.

examples:
  firsttoken bench load --rate 2 --mix 64,256:16,64
  firsttoken bench load random:llama-3.1-8b --rate 40 --seed 1 --seconds 12 --json
  firsttoken bench load random:llama-3.1-8b --rate 30 --beside car=p0,4,64:32 --targets targets.toml
  firsttoken bench load random:llama-3.1-8b --concurrency 32 --target-ttft 100ms --target-itl 20ms
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pace = parser.add_mutually_exclusive_group(required=True)
    pace.add_argument("--rate", type=positive_number, metavar="R", help="requests a second, arriving at random")
    pace.add_argument("--concurrency", type=positive_int, metavar="N", help="callers that each wait for their answer")
    parser.add_argument(
        "--mix", type=_mix, default=DEFAULT_MIX, metavar="IN,..:OUT,..", help=f"lengths (default: {DEFAULT_MIX})"
    )
    parser.add_argument("--seed", type=whole_int, default=1, metavar="N", help="of arrivals and lengths (default: 1)")
    parser.add_argument(
        "--seconds", type=positive_number, default=12.0, metavar="S", help="how long requests are sent (default: 12)"
    )
    parser.add_argument(
        "--warmup", type=natural_number, default=2.0, metavar="S", help="the same, unmeasured, before (default: 2)"
    )
    parser.add_argument(
        "--prepare",
        type=natural_number,
        default=60.0,
        metavar="S",
        help="how long the idle engine may capture its steps before that (default: 60, mostly done in less)",
    )
    parser.add_argument("--target-ttft", type=duration_ms, metavar="TIME", help="for the first token, as in 80ms")
    parser.add_argument("--target-itl", type=duration_ms, metavar="TIME", help="for the gaps, as in 20ms")
    parser.add_argument(
        "--beside",
        type=_stream,
        action="append",
        default=[],
        metavar="NAME=CLASS,RATE,IN,..:OUT,..",
        help="requests of a service class that arrive beside the load, told apart (repeatable)",
    )
    add_results(parser)
    add_model(parser)


def run(options: argparse.Namespace) -> int:
    from firsttoken.engine.launch import engine_process

    if str(getattr(options, "model", "")).startswith(("http://", "https://")):
        raise ConfigError("bench load measures an engine that it starts itself: give a model, not a server's URL")
    rate, seconds = options.rate, options.seconds
    if rate is not None and round(rate * seconds) < 1:
        raise ConfigError(f"a rate of {rate:g} for {seconds:g} s is no request at all: raise one of them")
    args = engine_args(options)
    with engine_process(args) as handle:
        from firsttoken.bench.load import LoadConfig

        config = LoadConfig(
            mix=options.mix,
            rate=rate,
            concurrency=options.concurrency,
            seconds=seconds,
            prepare_s=options.prepare,
            warmup_s=options.warmup,
            seed=options.seed,
            target_ttft_ms=options.target_ttft,
            target_itl_ms=options.target_itl,
            beside=tuple(options.beside),
        )
        result = run_async(_measure, args, handle, config)
    hand_in(options, result, _lines(result))
    missed = any(not target["met"] for target in result["targets"].values())
    return 1 if missed or result["requests"]["failed"] else 0


def _mix(text: str) -> Any:
    from firsttoken.bench.arrivals import Mix

    try:
        return Mix.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _stream(text: str) -> Any:
    from firsttoken.bench.load import Stream

    try:
        return Stream.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def _measure(args: EngineArgs, handle: LaunchedEngine, config: LoadConfig) -> dict[str, Any]:
    from firsttoken.bench.load import measure_load
    from firsttoken.bench.session import open_session
    from firsttoken.cli import report
    from firsttoken.engine.start_account import process_began_ns

    async with open_session(args, process_began_ns(), handle) as session:
        figures = await measure_load(session, config, say)
        head = report.header(
            session.llm.info,
            rate=config.rate,
            concurrency=config.concurrency,
            mix=str(config.mix),
            seed=config.seed,
            seconds=config.seconds,
        )
    return {**head, **figures}


def _lines(result: dict[str, Any]) -> list[str]:
    requests = result["requests"]
    where = result.get("device_name") or result["device"]
    pace = f"{result['rate']:g} requests/s" if result["rate"] is not None else f"{result['concurrency']} callers"
    lines = [
        f"{result['model']} on {where}: {pace}, mix {result['mix']}, seed {result['seed']}",
        f"{requests['sent']} requests sent, {requests['ok']} ok, {requests['failed']} failed",
        *(f"  {count} x {reason}" for reason, count in requests["reasons"].items()),
        *percentile_lines(result),
        f"{result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:,.1f} output tokens/s, goodput "
        f"{result['goodput_rps']:.2f} requests/s",
    ]
    for name, found in result.get("beside", {}).items():
        lines += [f"{name}: {found['sent']} requests sent, {found['ok']} ok", *percentile_lines(found)]
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "MISSED"
        lines.append(f"target {name} p99 <= {target['target']:g}: {target['p99']:.2f}, {verdict}")
    return [*lines, memory_line(result), start_line(result)]
