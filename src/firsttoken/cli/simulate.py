"""``firsttoken simulate``: what scheduling policies do to a load, on a measured GPU and under a virtual clock."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_load import DEFAULT_MIX
from firsttoken.cli.bench_options import add_results, duration_ms, hand_in, positive_number, say
from firsttoken.cli.options import positive_int, whole_int
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.simulate.gpu import GPU, StepTable
    from firsttoken.simulate.run import EngineShape, Outcome
    from firsttoken.simulate.workload import Job

NAME = "simulate"
HELP = "what scheduling policies do to a load, on a measured GPU under a virtual clock"
DEFAULT_SECONDS = 12.0
EPILOG = """\
The scheduler and the KV cache are the engine's own; each step takes what a model fitted to measured steps says,
whose error on steps that it was not shown is part of the result. The host's work takes no time, so a real engine
is somewhat slower. --trace takes Mooncake's JSON lines and Azure's CSV; --rate sends what bench load sends.

policies: default (the CUDA device's own), fcfs-512, fcfs-2048, fcfs-8192 (first come, first served, so many
token rows a step), prefill-first (decode rows wait while a prompt can be computed)

examples:
  firsttoken simulate --rate 40 --policy default,fcfs-2048,prefill-first
  firsttoken simulate --trace mooncake_conversation_trace.jsonl --scale 0.5 --json --png latency.png
  firsttoken simulate --rate 10 --steps steps.json --kv-blocks 4096
"""
GPU_DEFAULTS = {"gpu": "h200", "shape": "llama-3.1-8b"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", type=Path, metavar="FILE", help="requests as they were recorded somewhere")
    load.add_argument("--rate", type=positive_number, metavar="R", help="requests a second, arriving at random")
    parser.add_argument("--mix", metavar="IN,..:OUT,..", help=f"lengths with --rate (default: {DEFAULT_MIX})")
    parser.add_argument("--seed", type=whole_int, metavar="N", help="of arrivals and lengths with --rate (default: 1)")
    parser.add_argument(
        "--seconds",
        type=positive_number,
        metavar="S",
        help=f"how long requests are sent (default: {DEFAULT_SECONDS:g}), or how much of the trace (default: all)",
    )
    parser.add_argument(
        "--scale", type=positive_number, default=1.0, metavar="S", help="requests come S times as fast (default: 1)"
    )
    parser.add_argument("--policy", default="default", metavar="NAME,..", help="see below (default: default)")
    parser.add_argument("--target-ttft", type=duration_ms, metavar="TIME", help="for the first token, as in 80ms")
    parser.add_argument("--target-itl", type=duration_ms, metavar="TIME", help="for the gaps, as in 20ms")
    _add_engine(parser)
    add_results(parser, "--output")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the shares of TTFT, ITL and E2E")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the simulated engine")
    for name, default in GPU_DEFAULTS.items():
        group.add_argument(f"--{name}", metavar="NAME", help=f"whose measured steps (default: {default})")
    group.add_argument("--steps", type=Path, metavar="FILE", help="a result of bench steps instead")
    group.add_argument(
        "--kv-blocks", type=positive_int, metavar="N", help="KV blocks of 16 tokens (default: what the GPU has)"
    )
    group.add_argument(
        "--max-num-seqs", type=positive_int, default=64, metavar="N", help="most requests at once (default: 64)"
    )
    group.add_argument(
        "--max-model-len", type=positive_int, default=131072, metavar="N", help="longest request (default: 131072)"
    )


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report
    from firsttoken.devices.cuda import POLICY
    from firsttoken.simulate.figures import Targets
    from firsttoken.simulate.gpu import model_gpu
    from firsttoken.simulate.policies import find_policy
    from firsttoken.simulate.run import EngineShape, simulate

    policies = [find_policy(name, POLICY.budget) for name in options.policy.split(",")]
    jobs = _jobs(options)
    gpu = model_gpu(_table(options))
    engine = EngineShape(
        kv_blocks=_kv_blocks(options, gpu.table),
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        in_flight=POLICY.in_flight,
    )
    targets = Targets(options.target_ttft, options.target_itl)
    outcomes, results = [], []
    for policy in policies:
        say(f"{policy.name}: {len(jobs)} requests")
        began = time.perf_counter()
        outcomes.append(simulate(jobs, policy, engine, gpu.step_time, targets))
        results.append(_result(policy.name, outcomes[-1], gpu, len(jobs), time.perf_counter() - began))
    head = report.header(**_head(options, gpu, engine))
    result = {**head, **results[0]} if len(results) == 1 else {**head, "results": results}
    if options.png is not None:
        _draw(options.png, head, [policy.name for policy in policies], outcomes)
    hand_in(options, result, _lines(head, results))
    return 0


def _jobs(options: argparse.Namespace) -> list[Job]:
    from firsttoken.bench.arrivals import Mix
    from firsttoken.simulate.traces import read_trace
    from firsttoken.simulate.workload import poisson_jobs, speeded_up, within

    if options.trace is not None:
        if options.mix is not None or options.seed is not None:
            raise ConfigError("--mix and --seed make a load with --rate; a trace has its own lengths and times")
        jobs = read_trace(options.trace)
        return speeded_up(jobs if options.seconds is None else within(jobs, options.seconds), options.scale)
    options.mix = options.mix or DEFAULT_MIX
    options.seed = 1 if options.seed is None else options.seed
    options.seconds = options.seconds or DEFAULT_SECONDS
    try:
        mix = Mix.parse(options.mix)
    except ValueError as error:
        raise ConfigError(f"--mix: {error}") from None
    if round(options.rate * options.seconds) < 1:
        raise ConfigError(
            f"a rate of {options.rate:g} for {options.seconds:g} s is no request at all: raise one of them"
        )
    return speeded_up(poisson_jobs(options.rate, options.seconds, mix, options.seed), options.scale)


def _table(options: argparse.Namespace) -> StepTable:
    from firsttoken.simulate.gpu import packaged_table, read_table

    given = {name: getattr(options, name) for name in GPU_DEFAULTS if getattr(options, name) is not None}
    if options.steps is None:
        return packaged_table(**{**GPU_DEFAULTS, **given})
    if given:
        raise ConfigError(
            "--steps says itself on which GPU and shape its steps were measured: leave out --gpu, --shape"
        )
    return read_table(options.steps)


def _kv_blocks(options: argparse.Namespace, table: StepTable) -> int:
    found: int = options.kv_blocks or table.kv_blocks
    if not found:
        raise ConfigError(f"{options.steps} does not say how many KV blocks there are: give --kv-blocks")
    return found


def _head(options: argparse.Namespace, gpu: GPU, engine: EngineShape) -> dict[str, Any]:
    return {
        "device_name": gpu.table.device_name,
        "model": gpu.table.model,
        "trace": None if options.trace is None else options.trace.name,
        "rate": options.rate,
        "mix": options.mix,
        "seed": options.seed,
        "seconds": options.seconds,
        "scale": options.scale,
        "kv_blocks": engine.kv_blocks,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": engine.max_model_len,
        "in_flight": engine.in_flight,
    }


def _result(policy: str, outcome: Outcome, gpu: GPU, sent: int, wall_s: float) -> dict[str, Any]:
    failed = sum(outcome.refused.values())
    return {
        "policy": policy,
        "requests": {"sent": sent, "ok": sent - failed, "failed": failed, "reasons": dict(outcome.refused)},
        "classes": {name: figures.result(outcome.virtual_ns) for name, figures in sorted(outcome.classes.items())},
        "preemptions": outcome.preemptions,
        "kv": {"hit_ratio": outcome.hit_ratio, "evictions": outcome.evictions},
        "output_tokens": outcome.output_tokens,
        "steps": outcome.steps,
        "step_time_error": gpu.error,
        "virtual_s": outcome.virtual_ns / 1e9,
        "wall_s": wall_s,
    }


def _draw(path: Path, head: dict[str, Any], names: list[str], outcomes: list[Outcome]) -> None:
    from firsttoken.simulate.picture import Curve, draw_shares

    panels = {
        title: [
            Curve(_label(name, service_class, len(outcome.classes)), getattr(figures, attribute))
            for name, outcome in zip(names, outcomes, strict=True)
            for service_class, figures in sorted(outcome.classes.items())
        ]
        for title, attribute in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
    }
    draw_shares(path, _title(head), panels)


def _label(policy: str, service_class: str, classes: int) -> str:
    return policy if classes == 1 else f"{policy} {service_class}"


def _title(head: dict[str, Any]) -> str:
    load = head["trace"] or f"{head['rate']:g} requests/s, mix {head['mix']}, seed {head['seed']}"
    scale = "" if head["scale"] == 1 else f", {head['scale']:g} times as fast"
    return f"{head['model']} on {head['device_name']}, simulated: {load}{scale}"


def _lines(head: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    lines = [
        _title(head),
        f"{head['kv_blocks']} KV blocks, {head['max_num_seqs']} requests at once; step times are off by (p50/p90) "
        + ", ".join(
            f"{kind} {100 * error['p50']:.1f}/{100 * error['p90']:.1f} %"
            for kind, error in results[0]["step_time_error"].items()
        ),
        f"{'p50 / p99 in ms':<18}{'TTFT':>22}{'ITL':>18}{'E2E':>22}{'goodput/s':>11}{'preempted':>11}{'hits':>7}",
    ]
    for result in results:
        for name, figures in result["classes"].items():
            label = _label(result["policy"], name, len(result["classes"]))
            ttft, itl, e2e = (_pair(figures[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))
            lines.append(
                f"{label:<18}{ttft:>22}{itl:>18}{e2e:>22}"
                f"{figures['goodput']:>11.2f}{result['preemptions']:>11}{100 * result['kv']['hit_ratio']:>6.1f}%"
            )
    for result in results:
        lines += [f"{result['policy']}: refused {n} x {reason}" for reason, n in result["requests"]["reasons"].items()]
    steps, wall = sum(result["steps"] for result in results), sum(result["wall_s"] for result in results)
    return [*lines, f"{steps} steps, {sum(result['virtual_s'] for result in results):.1f} virtual s in {wall:.1f} s"]


def _pair(found: dict[str, float]) -> str:
    return f"{found['p50']:.1f} / {found['p99']:.1f}" if found else "-"
