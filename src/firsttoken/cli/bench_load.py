"""``firsttoken bench load``: latency and goodput under requests that arrive by themselves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import (
    add_model,
    add_results,
    duration_ms,
    hand_in,
    memory_line,
    natural_number,
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
HELP = "latency and goodput under requests that arrive by themselves, of an engine or of any OpenAI-compatible server"
DEFAULT_MIX = "64,256,512,2048:16,64,128"
DEFAULT_PREPARE_S = 60.0
EPILOG = """\
In place of MODEL the URL of a server that runs, ours or any other that speaks OpenAI's API.

With --rate, rate x seconds requests arrive at random (Poisson). The draws, for each in this order, of Python's
random.Random(seed): expovariate(rate), the input's length, the output's. A request counts as good when its
first token came within --target-ttft and 99 % of its gaps are within --target-itl. The exit code is 1 when the
p99 over all misses a stated target, or when a request failed.

examples:
  firsttoken bench load --rate 2 --mix 64,256:16,64
  firsttoken bench load http://127.0.0.1:8000 --concurrency 32 --chat --mix 256:64
  firsttoken bench load http://127.0.0.1:8000 --rates 1,2,4,8 --repeat 3 --target-ttft 200ms --png load.png
  firsttoken bench load http://127.0.0.1:8000 --trace mooncake_trace.jsonl --scale 2 --seconds 60
  firsttoken bench load random:llama-3.1-8b --rate 40 --seed 1 --seconds 12 --json
  firsttoken bench load random:llama-3.1-8b --rate 30 --beside car=p0,4,64:32 --targets targets.toml
  firsttoken bench load random:llama-3.1-8b --concurrency 32 --target-ttft 100ms --target-itl 20ms
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from firsttoken.cli.bench_load_url import add_server_options

    pace = parser.add_mutually_exclusive_group(required=True)
    pace.add_argument("--rate", type=positive_number, metavar="R", help="requests a second, arriving at random")
    pace.add_argument("--rates", type=_rates, metavar="R,..", help="the same at several rates, one after the other")
    pace.add_argument("--concurrency", type=positive_int, metavar="N", help="callers that each wait for their answer")
    pace.add_argument("--burst", type=_burst, metavar="N,every S", help="N requests at once, every S seconds")
    pace.add_argument("--trace", type=Path, metavar="FILE", help="arrivals, lengths and prefixes of Mooncake or Azure")
    parser.add_argument("--scale", type=positive_number, metavar="S", help="send the trace S times as fast")
    parser.add_argument("--mix", type=_mix, metavar="IN,..:OUT,..", help=f"lengths (default: {DEFAULT_MIX})")
    parser.add_argument("--seed", type=whole_int, default=1, metavar="N", help="of arrivals and lengths (default: 1)")
    parser.add_argument(
        "--seconds", type=positive_number, default=12.0, metavar="S", help="how long requests are sent (default: 12)"
    )
    parser.add_argument(
        "--warmup", type=natural_number, default=2.0, metavar="S", help="the same, unmeasured, before (default: 2)"
    )
    parser.add_argument(
        "--repeat",
        type=positive_int,
        default=1,
        metavar="N",
        help="measure N times: means, with their 95%% confidence intervals (default: 1)",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="with --rates: a picture of latency against goodput")
    parser.add_argument(
        "--prepare",
        type=natural_number,
        metavar="S",
        help=f"how long the idle engine may capture its steps before that (default: {DEFAULT_PREPARE_S:g}, mostly "
        "done in less)",
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
    add_server_options(parser)
    add_model(parser)


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli.bench_load_url import is_url, measure_url, refuse_server_options

    load = load_options(options)
    if is_url(options):
        head, results = measure_url(options, load)
    else:
        refuse_server_options(options)
        head, results = _measure_model(options, load)
    head |= {"rates": options.rates, "repeat": options.repeat}
    if options.rates is None:
        result: dict[str, Any] = {**head, **results[0]}
    else:
        result = {**head, "results": results}
        if options.png is not None:
            _draw(options.png, head, results)
    hand_in(options, result, _lines(head, results))
    missed = any(not target["met"] for one in results for target in one["targets"].values())
    if any(one.get("stopped") for one in results):
        return 1
    return 1 if missed or any(one["requests"]["failed"] for one in results) else 0


# ---------------------------------------------------------------- the load


def load_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `bench.shape.Load`. Raises `ConfigError`, and `OSError` for a trace that cannot be read."""
    from firsttoken.bench.arrivals import Mix

    for rate in options.rates or [options.rate or 1.0]:
        if options.rate is not None or options.rates is not None:
            _check_rate(rate, options.seconds)
    if options.png is not None and options.rates is None:
        raise ConfigError("--png draws how latency goes with the rate: give several by --rates")
    if options.scale is not None and options.trace is None:
        raise ConfigError("--scale speeds a trace up: give one by --trace")
    if options.trace is not None and options.mix is not None:
        raise ConfigError("--trace has the lengths of its requests: leave out --mix")
    return {
        "mix": options.mix or Mix.parse(DEFAULT_MIX),
        "rate": options.rate,
        "concurrency": options.concurrency,
        "burst": options.burst,
        "trace": _trace(options),
        "seconds": options.seconds,
        "warmup_s": options.warmup,
        "seed": options.seed,
        "target_ttft_ms": options.target_ttft,
        "target_itl_ms": options.target_itl,
    }


def load_head(options: argparse.Namespace, load: dict[str, Any]) -> dict[str, Any]:
    """The part of a result's head that says which load it was."""
    return {
        "rate": load["rate"],
        "concurrency": load["concurrency"],
        "burst": None if load["burst"] is None else str(load["burst"]),
        "trace": None if options.trace is None else options.trace.name,
        "scale": options.scale,
        "mix": None if options.trace is not None else str(load["mix"]),
        "seed": load["seed"],
        "seconds": load["seconds"],
    }


def _check_rate(rate: float, seconds: float) -> None:
    if round(rate * seconds) < 1:
        raise ConfigError(f"a rate of {rate:g} for {seconds:g} s is no request at all: raise one of them")


def _trace(options: argparse.Namespace) -> tuple[Any, ...]:
    if options.trace is None:
        return ()
    from firsttoken.core.service import ServiceClass
    from firsttoken.simulate.traces import read_trace
    from firsttoken.simulate.workload import as_arrivals, speeded_up, within

    jobs = within(speeded_up(read_trace(options.trace), options.scale or 1.0), options.seconds)
    if any(job.service is not ServiceClass.P2 for job in jobs):
        raise ConfigError(f"{options.trace} names service classes, which bench load does not send: use simulate for it")
    return tuple(as_arrivals(jobs))


def _rates(text: str) -> list[float]:
    return [positive_number(part) for part in text.split(",")]


def _mix(text: str) -> Any:
    from firsttoken.bench.arrivals import Mix

    return _parsed(Mix.parse, text)


def _burst(text: str) -> Any:
    from firsttoken.bench.arrivals import Burst

    return _parsed(Burst.parse, text)


def _stream(text: str) -> Any:
    from firsttoken.bench.load import Stream

    return _parsed(Stream.parse, text)


def _parsed(parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---------------------------------------------------------------- an engine


def _measure_model(options: argparse.Namespace, load: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from firsttoken.engine.launch import engine_process

    args = engine_args(options)
    with engine_process(args) as handle:
        from firsttoken.bench.load import LoadConfig

        prepare_s = DEFAULT_PREPARE_S if options.prepare is None else options.prepare
        config = LoadConfig(**load, prepare_s=prepare_s, beside=tuple(options.beside))
        return run_async(_measure, args, handle, config, options, load_head(options, load))


async def _measure(
    args: EngineArgs, handle: LaunchedEngine, config: LoadConfig, options: argparse.Namespace, head: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from firsttoken.bench.load import measure_load
    from firsttoken.bench.repeats import measure_all
    from firsttoken.bench.session import open_session
    from firsttoken.cli import report
    from firsttoken.engine.start_account import process_began_ns

    async with open_session(args, process_began_ns(), handle) as session:

        async def measure(load: LoadConfig, number: int) -> dict[str, Any]:
            return await measure_load(session, load, say, prompts=number)

        results = await measure_all(measure, config, options.rates or (), options.repeat)
        return report.header(session.llm.info, **head), results


# ---------------------------------------------------------------- results


def _draw(path: Path, head: dict[str, Any], results: list[dict[str, Any]]) -> None:
    from firsttoken.simulate.frontier import Point
    from firsttoken.simulate.frontier_picture import draw_frontier

    points = [
        Point(str(head["model"]), one["rate"], one["goodput_rps"], one["ttft_ms"]["p99"], one["itl_ms"].get("p99", 0.0))
        for one in results
        if one["ttft_ms"]
    ]
    if not points:
        raise ConfigError(f"nothing was answered at any rate: there is no picture to draw in {path}")
    try:
        draw_frontier(path, f"{head['model']}, mix {head['mix']}, seed {head['seed']}", points)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _lines(head: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    from firsttoken.cli.bench_load_lines import load_lines

    where = head.get("url") or head.get("device_name") or head["device"]
    lines = []
    for one in results:
        lines += load_lines(where, {**head, **one})
    if "start_s" in results[-1]:
        lines += [memory_line(results[-1]), start_line(results[-1])]
    return lines
