"""``firsttoken simulate``: what scheduling policies do to a load, on a measured GPU and under a virtual clock."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli import simulate_cache
from firsttoken.cli.bench_load import DEFAULT_MIX
from firsttoken.cli.bench_options import add_results, hand_in, positive_number, say
from firsttoken.cli.options import HelpFormatter, whole_int
from firsttoken.cli.simulate_options import (
    add_engine,
    add_targets,
    burst_list,
    class_shares,
    engine_head,
    engine_line,
    engine_shape,
    find_gpu,
    find_mix,
    find_targets,
    phase_list,
    targets_head,
)
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.simulate.gpu import GPU
    from firsttoken.simulate.run import Outcome
    from firsttoken.simulate.workload import Job

NAME = "simulate"
HELP = "what scheduling policies do to a load, on a measured GPU under a virtual clock"
DEFAULT_SECONDS = 12.0
EPILOG = """\
The scheduler and the KV cache are the engine's own; each step takes what a model fitted to measured steps says,
whose error on steps that it was not shown is part of the result, stretched as an engine under load was measured to.
--trace takes Mooncake's JSON lines (with "class": "p0" if they name one) and Azure's CSV; --rate sends what bench
load sends; --phases and --bursts follow one another.

policies: default (the CUDA device's own), fcfs-512, fcfs-2048, fcfs-8192 (first come, first served, so many
token rows a step), prefill-first (decode rows wait while a prompt can be computed)
windows: how long a waiting prompt is held so that others join its step: milliseconds, adaptive (follows the P95
of the first tokens and the queue; --target-ttft), predicted (only where the model of step times says it pays)

examples:
  firsttoken simulate --rate 40 --policy default,fcfs-2048,prefill-first
  firsttoken simulate --rate 50 --classes p0:0.2,p2:0.8 --targets targets.toml
  firsttoken simulate --phases 5:60,40:60,5:60 --bursts 32:10,32:10 --window 0,10,adaptive --target-ttft 80ms
  firsttoken simulate --trace mooncake_conversation_trace.jsonl --scale 0.5 --json --png latency.png
  firsttoken simulate --rate 10 --steps steps.json --kv-blocks 4096
  firsttoken simulate cache --help    eviction policies
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_parts(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests as they were recorded somewhere")
    parser.add_argument("--rate", type=positive_number, metavar="R", help="requests a second, arriving at random")
    parser.add_argument(
        "--phases", type=phase_list, metavar="R:S,..", help="R requests a second for S seconds, and so on"
    )
    parser.add_argument("--bursts", type=burst_list, metavar="N:S,..", help="N at once after S idle seconds, and so on")
    parser.add_argument(
        "--mix", metavar="IN,..:OUT,..", help=f"lengths where no trace has them (default: {DEFAULT_MIX})"
    )
    parser.add_argument("--classes", type=class_shares, metavar="P:SHARE,..", help="of requests, as in p0:0.2,p2:0.8")
    parser.add_argument("--seed", type=whole_int, metavar="N", help="of arrivals, lengths and classes (default: 1)")
    parser.add_argument(
        "--seconds",
        type=positive_number,
        metavar="S",
        help=f"how long --rate sends (default: {DEFAULT_SECONDS:g}), or how much of the trace (default: all)",
    )
    parser.add_argument(
        "--scale", type=positive_number, default=1.0, metavar="S", help="requests come S times as fast (default: 1)"
    )
    parser.add_argument("--policy", default="default", metavar="NAME,..", help="see below (default: default)")
    parser.add_argument("--window", default="0", metavar="MS|NAME,..", help="batch windows, see below (default: 0)")
    parser.add_argument(
        "--admission",
        choices=("on", "off"),
        default="off",
        help="turn requests away as an engine does, by its classes' targets and max_waiting (default: off)",
    )
    add_targets(parser)
    add_engine(parser)
    add_results(parser, "--output")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the shares of TTFT, ITL and E2E")


def _add_parts(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(part=None)
    parts = parser.add_subparsers(title="parts by themselves", metavar="[PART]", required=False)
    sub = parts.add_parser(
        simulate_cache.NAME,
        help=simulate_cache.HELP,
        description=simulate_cache.HELP[0].upper() + simulate_cache.HELP[1:] + ".",
        epilog=simulate_cache.EPILOG,
        formatter_class=HelpFormatter,
    )
    simulate_cache.add_arguments(sub)
    sub.set_defaults(part=simulate_cache.run, parser=sub)


def run(options: argparse.Namespace) -> int:
    if options.part is not None:
        return int(options.part(options))
    from firsttoken.cli import report
    from firsttoken.devices.cuda import POLICY
    from firsttoken.scheduler.window import find_window
    from firsttoken.simulate.policies import find_policy
    from firsttoken.simulate.run import simulate

    targets = find_targets(options)
    jobs = _jobs(options)
    gpu = find_gpu(options)
    engine = engine_shape(options, gpu)
    outcomes, results = [], []
    for policy_name in options.policy.split(","):
        for name in options.window.split(","):
            policy = find_policy(policy_name, POLICY.budget, gpu.alone)
            window = find_window(name, targets, queue_limit=engine.max_num_seqs, step_time=gpu.step_time)
            say(f"{policy.name}, window {name}: {len(jobs)} requests")
            began = time.perf_counter()
            outcome = simulate(
                jobs, policy, engine, gpu.step_time, targets, window=window, admission=options.admission == "on"
            )
            outcomes.append(outcome)
            results.append(_result(policy.name, name, outcome, gpu, len(jobs), time.perf_counter() - began))
    head = report.header(**_load_head(options), **engine_head(gpu, engine))
    result = {**head, **results[0]} if len(results) == 1 else {**head, "results": results}
    if options.png is not None:
        _draw(options.png, head, results, outcomes)
    hand_in(options, result, _lines(head, results))
    return 0


def _jobs(options: argparse.Namespace) -> list[Job]:
    from firsttoken.simulate.workload import speeded_up, with_classes

    loads = [name for name in ("trace", "rate") if getattr(options, name) is not None]
    if options.phases is not None or options.bursts is not None:
        loads.append("phases")
    if len(loads) != 1:
        raise ConfigError("say which load: one of --trace, --rate, or --phases and --bursts")
    jobs = {"trace": _traced, "rate": _poisson, "phases": _shaped}[loads[0]](options)
    if not jobs:
        raise ConfigError("the load has no request at all: raise the rates or the times")
    if options.classes is not None:
        if any(job.service != jobs[0].service for job in jobs):
            raise ConfigError("--classes gives requests their classes, but the trace has its own: leave it out")
        jobs = with_classes(jobs, options.classes, options.seed)
    return speeded_up(jobs, options.scale)


def _traced(options: argparse.Namespace) -> list[Job]:
    from firsttoken.simulate.traces import read_trace
    from firsttoken.simulate.workload import within

    if options.mix is not None or (options.seed is not None and options.classes is None):
        raise ConfigError("--mix and --seed make a load; a trace has its own lengths and times")
    if options.classes is not None and options.seed is None:
        options.seed = 1
    jobs = read_trace(options.trace)
    return jobs if options.seconds is None else within(jobs, options.seconds)


def _poisson(options: argparse.Namespace) -> list[Job]:
    from firsttoken.simulate.workload import poisson_jobs

    options.mix = options.mix or DEFAULT_MIX
    options.seed = 1 if options.seed is None else options.seed
    options.seconds = options.seconds or DEFAULT_SECONDS
    return poisson_jobs(options.rate, options.seconds, find_mix(options.mix), options.seed)


def _shaped(options: argparse.Namespace) -> list[Job]:
    from firsttoken.simulate.workload import shaped_jobs

    if options.seconds is not None:
        raise ConfigError("--phases and --bursts say themselves how long they last: leave out --seconds")
    options.mix = options.mix or DEFAULT_MIX
    options.seed = 1 if options.seed is None else options.seed
    return shaped_jobs(options.phases or [], options.bursts or [], find_mix(options.mix), options.seed)


def _load_head(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "trace": None if options.trace is None else options.trace.name,
        "rate": options.rate,
        "phases": [[phase.rate, phase.seconds] for phase in options.phases or []],
        "bursts": [[burst.requests, burst.idle_s] for burst in options.bursts or []],
        "mix": options.mix,
        "shares": {service.name.lower(): share for service, share in (options.classes or {}).items()},
        "seed": options.seed,
        "seconds": options.seconds,
        "scale": options.scale,
        "targets": targets_head(options),
        "admission": options.admission,
    }


def _result(policy: str, window: str, outcome: Outcome, gpu: GPU, sent: int, wall_s: float) -> dict[str, Any]:
    failed = sum(outcome.refused.values())
    return {
        "policy": policy,
        "window": window,
        "requests": {
            "sent": sent,
            "ok": sent - failed,
            "failed": failed,
            "reasons": dict(outcome.refused),
            "within_targets": sum(figures.good for figures in outcome.classes.values()),
        },
        "classes": {name: figures.result(outcome.virtual_ns) for name, figures in sorted(outcome.classes.items())},
        "preemptions": outcome.preemptions,
        "kv": {"hit_ratio": outcome.hit_ratio, "evictions": outcome.evictions},
        "output_tokens": outcome.output_tokens,
        "steps": outcome.steps,
        "step_time_error": gpu.error,
        "virtual_s": outcome.virtual_ns / 1e9,
        "wall_s": wall_s,
    }


def _draw(path: Path, head: dict[str, Any], results: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
    from firsttoken.simulate.picture import Curve, draw_shares

    panels = {
        title: [
            Curve(_label(result, name, results), getattr(figures, attribute))
            for result, outcome in zip(results, outcomes, strict=True)
            for name, figures in sorted(outcome.classes.items())
        ]
        for title, attribute in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
    }
    draw_shares(path, _title(head), panels)


def _label(result: dict[str, Any], service: str, results: list[dict[str, Any]]) -> str:
    """The policy, and the window and the class where there are several."""
    windows = len({each["window"] for each in results}) > 1
    words = [result["policy"], result["window"] if windows else "", service if len(result["classes"]) > 1 else ""]
    return " ".join(word for word in words if word)


def _title(head: dict[str, Any]) -> str:
    scale = "" if head["scale"] == 1 else f", {head['scale']:g} times as fast"
    return f"{head['model']} on {head['device_name']}, simulated: {_load(head)}{scale}"


def _load(head: dict[str, Any]) -> str:
    if head["trace"]:
        return str(head["trace"])
    parts = [f"{head['rate']:g} requests/s"] if head["rate"] else []
    parts += [f"{rate:g} requests/s for {seconds:g} s" for rate, seconds in head["phases"]]
    parts += [f"{count} at once after {idle:g} s" for count, idle in head["bursts"]]
    return f"{', '.join(parts)}, mix {head['mix']}, seed {head['seed']}"


def _lines(head: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    labels = [[(_label(result, name, results), name) for name in result["classes"]] for result in results]
    width = max(18, *(len(label) + 2 for each in labels for label, _ in each)) if any(labels) else 18
    lines = [
        _title(head),
        engine_line(head, results[0]["step_time_error"]),
        f"{'p50 / p99 in ms':<{width}}{'TTFT':>22}{'ITL':>18}{'E2E':>22}"
        f"{'in target':>11}{'goodput/s':>11}{'preempted':>11}{'hits':>7}",
    ]
    for result, each in zip(results, labels, strict=True):
        for label, name in each:
            figures = result["classes"][name]
            ttft, itl, e2e = (_pair(figures[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))
            lines.append(
                f"{label:<{width}}{ttft:>22}{itl:>18}{e2e:>22}{figures['good']:>11}"
                f"{figures['goodput']:>11.2f}{result['preemptions']:>11}{100 * result['kv']['hit_ratio']:>6.1f}%"
            )
    for result in results:
        lines += [f"{result['policy']}: refused {n} x {reason}" for reason, n in result["requests"]["reasons"].items()]
    steps, wall = sum(result["steps"] for result in results), sum(result["wall_s"] for result in results)
    return [*lines, f"{steps} steps, {sum(result['virtual_s'] for result in results):.1f} virtual s in {wall:.1f} s"]


def _pair(found: dict[str, float]) -> str:
    return f"{found['p50']:.1f} / {found['p99']:.1f}" if found else "-"
