"""``firsttoken replay``: what a flight recorder kept, run again in the simulator."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import add_results, hand_in, positive_number, say
from firsttoken.cli.options import positive_int, whole_int
from firsttoken.cli.simulate_options import GPU_DEFAULTS
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.core.step_sizes import StepSizes
    from firsttoken.devices.interface import DevicePolicy
    from firsttoken.observability.flight_file import Flight
    from firsttoken.scheduler.step_time import FittedStepTime, StepTime
    from firsttoken.simulate.replay import RecordedLoad
    from firsttoken.simulate.run import EngineShape, Outcome

NAME = "replay"
HELP = "run again in the simulator what a server's flight recorder kept"
EPILOG = """\
A server writes a recording on SIGUSR1 and when its engine dies (serve --flight-dir says where). Its requests come
again as they came, with the same classes, lengths and common beginnings; steps take what a model fitted to the
recording's own steps says, and scatter about it as they did. Recorded figures stand beside replayed ones.

policies: default (that of the recorded device), fcfs-512, fcfs-2048, fcfs-8192, prefill-first

examples:
  firsttoken replay flight-20261130T101500.123Z-4711.jsonl
  firsttoken replay FILE --policy default,fcfs-2048         what another policy would have done
  firsttoken replay FILE --scale 1.5 --kv-blocks 2048       half as many requests more, and less memory
  firsttoken replay FILE --closed                           callers who wait for an answer before they ask again
"""
SHIPPED = " ".join(GPU_DEFAULTS.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, metavar="FILE", help="what the flight recorder wrote")
    parser.add_argument("--policy", default="default", metavar="NAME,..", help="see below (default: default)")
    parser.add_argument("--kv-blocks", type=positive_int, metavar="N", help="KV blocks (default: as recorded)")
    parser.add_argument(
        "--max-num-seqs", type=positive_int, metavar="N", help="most requests at once (default: as recorded)"
    )
    parser.add_argument(
        "--scale", type=positive_number, default=1.0, metavar="S", help="requests come S times as fast (default: 1)"
    )
    parser.add_argument(
        "--closed",
        action="store_true",
        help="each request as long after another's end as it came, not at its time",
    )
    parser.add_argument(
        "--admission",
        choices=("on", "off"),
        default="on",
        help="turn requests away as the engine does (default: on)",
    )
    parser.add_argument("--seed", type=whole_int, default=1, metavar="N", help="of how step times scatter (default: 1)")
    add_results(parser, "--output")


@dataclass(frozen=True)
class _Times:
    """What steps take: ``scattered()`` for a run, ``model`` for a policy that learns; ``source`` and ``why`` say where
    that is from."""

    model: FittedStepTime
    scattered: Callable[[], StepTime]
    host_ms: float
    source: str
    why: str | None
    error: dict[str, dict[str, float]]


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report
    from firsttoken.observability.flight_file import read_flight
    from firsttoken.scheduler.window import find_window
    from firsttoken.simulate.policies import find_policy
    from firsttoken.simulate.replay import recorded_load
    from firsttoken.simulate.run import simulate
    from firsttoken.simulate.workload import speeded_up

    try:
        flight = read_flight(options.recording, partial=True)
    except OSError as error:
        raise ConfigError(f"cannot read {options.recording}: {error.strerror or error}") from None
    load = recorded_load(flight, closed=options.closed)
    device = _device(flight)
    settings = flight.head.settings
    depth = settings.in_flight or device.in_flight
    times = _times(options, flight, device.sizes, depth)
    engine = _engine(options, flight, depth, times.host_ms)
    if settings.kv_host_memory:
        say("the recorded engine kept KV in host memory too, which is not simulated: fewer tokens will be found")
    jobs = speeded_up(load.jobs, options.scale)

    def budget(step_time: StepTime) -> Any:
        return device.budget(step_time).limited(settings.prefill_tokens, settings.mixed_prefill_tokens)

    results = []
    for name in options.policy.split(","):
        say(f"{name}: {len(jobs)} requests")
        policy = find_policy(name, budget, times.model)
        window = find_window(
            settings.batch_window, settings.targets, queue_limit=engine.max_num_seqs, step_time=times.model
        )
        began = time.perf_counter()
        outcome = simulate(
            jobs,
            policy,
            engine,
            times.scattered(),
            settings.targets,
            window=window,
            admission=options.admission == "on",
        )
        results.append(_replayed(name, outcome, flight, time.perf_counter() - began))
    result = {
        **report.header(flight.head.info),
        "recording": _recording(options.recording, flight, load),
        "scale": options.scale,
        "closed": options.closed,
        "admission": options.admission,
        "engine": {
            "kv_blocks": engine.kv_blocks,
            "max_num_seqs": engine.max_num_seqs,
            "max_model_len": engine.max_model_len,
            "kv_eviction": engine.eviction,
            "in_flight": engine.in_flight,
            "batch_window": settings.batch_window,
        },
        "step_times": {
            "source": times.source,
            "why": times.why,
            "host_ms": times.host_ms,
            "error": times.error,
        },
        "recorded": _recorded(flight),
        "replayed": results,
    }
    result["warnings"] = _warnings(options, flight, result)
    hand_in(options, result, _lines(result))
    return 0


def _device(flight: Flight) -> DevicePolicy:
    """The defaults of the kind of device that was recorded."""
    from firsttoken.devices import cpu, cuda

    kind = "" if flight.head.info is None else flight.head.info.device
    return cuda.POLICY if kind == "cuda" else cpu.POLICY


def _times(options: argparse.Namespace, flight: Flight, sizes: StepSizes, depth: int) -> _Times:
    from firsttoken.simulate.gpu import model_gpu, packaged_table
    from firsttoken.simulate.recorded_steps import ScatteredStepTime, TooFewSteps, fit_recorded

    try:
        recorded = fit_recorded(flight.steps, sizes, depth, options.seed)
    except TooFewSteps as few:
        gpu = model_gpu(packaged_table(**GPU_DEFAULTS))
        why = f"{few}; those of {SHIPPED} are taken, so times say nothing about the recorded device"
        return _Times(gpu.alone, lambda: gpu.step_time, gpu.sustained.host_ms, SHIPPED, why, gpu.error)
    return _Times(
        recorded.model,
        lambda: ScatteredStepTime(recorded, flight.requests[0].at_ns, options.scale, options.seed),
        recorded.host_ms,
        "recording",
        None,
        recorded.error,
    )


def _engine(options: argparse.Namespace, flight: Flight, depth: int, host_ms: float) -> EngineShape:
    from firsttoken.simulate.run import EngineShape

    info = flight.head.info
    if info is None:
        raise ConfigError(f"{options.recording} does not say which engine it is of: it died before it was ready")
    return EngineShape(
        kv_blocks=options.kv_blocks or info.kv_blocks,
        max_num_seqs=options.max_num_seqs or info.max_num_seqs,
        max_model_len=info.max_model_len,
        in_flight=depth,
        host_ms=host_ms,
        eviction=flight.head.settings.kv_eviction,
    )


def _recording(path: Path, flight: Flight, load: RecordedLoad) -> dict[str, Any]:
    from firsttoken.simulate.replay import CUT_SHORT, recorded_seconds

    head = flight.head
    return {
        "file": path.name,
        "reason": head.reason,
        "written": datetime.fromtimestamp(head.written_unix_ns / 1e9, UTC).isoformat(timespec="seconds"),
        "firsttoken": head.firsttoken,
        "seconds": recorded_seconds(flight),
        "requests": {
            "recorded": len(flight.requests),
            "replayed": len(load.jobs),
            "left_out": dict(sorted(load.left_out.items())),
            "cut_short": sum(job.group == CUT_SHORT for job in load.jobs),
            "outcomes": dict(Counter(request.outcome for request in flight.requests)),
        },
        "missing": flight.missing or None,
        "events": [{"kind": event.kind, "text": event.text} for event in flight.events],
    }


def _warnings(options: argparse.Namespace, flight: Flight, result: dict[str, Any]) -> list[str]:
    from firsttoken.simulate.replay import far_off

    found = []
    if flight.missing:
        found.append(
            f"the recording {flight.missing}: only what is whole of it is run again, and figures miss the rest"
        )
    if result["step_times"]["why"]:
        found.append(result["step_times"]["why"])
    as_recorded = options.scale == 1 and options.kv_blocks is None and options.max_num_seqs is None
    as_recorded = as_recorded and result["step_times"]["source"] == "recording"
    same = next((one for one in result["replayed"] if one["policy"] == "default"), None)
    off = far_off(result["recorded"]["classes"], same["classes"]) if same is not None and as_recorded else None
    if off is not None:
        text = (
            f"replayed as it was recorded, {off}: compare policies with the replayed default, not with the recording."
        )
        if not options.closed:
            text += (
                " Requests come at their recorded times: callers who wait for an answer before they ask again would "
                "have come later where steps are slower (--closed does so)"
            )
        found.append(text)
    return found


def _recorded(flight: Flight) -> dict[str, Any]:
    from firsttoken.simulate.replay import delivery_ms, recorded_figures, recorded_hit_ratio

    return {
        "classes": recorded_figures(flight.requests),
        "delivery_ms": delivery_ms(flight),
        "preemptions": sum(request.preemptions for request in flight.requests),
        "hit_ratio": recorded_hit_ratio(flight.requests),
        "steps": len(flight.steps),
    }


def _replayed(policy: str, outcome: Outcome, flight: Flight, wall_s: float) -> dict[str, Any]:
    """First tokens and ends are told as the front end would have known them."""
    from firsttoken.simulate.replay import delivery_ms

    late = delivery_ms(flight)
    classes = {}
    for name, figures in sorted(outcome.classes.items()):
        found = figures.result(outcome.virtual_ns)
        for key in ("ttft_ms", "e2e_ms"):
            found[key] = {level: ms + late for level, ms in found[key].items()}
        classes[name] = {key: found[key] for key in ("requests", "good", "ttft_ms", "itl_ms", "e2e_ms", "goodput")}
    return {
        "policy": policy,
        "classes": classes,
        "refused": dict(outcome.refused),
        "left": outcome.left,
        "expired": outcome.expired,
        "preemptions": outcome.preemptions,
        "hit_ratio": outcome.hit_ratio,
        "evictions": outcome.evictions,
        "steps": outcome.steps,
        "virtual_s": outcome.virtual_ns / 1e9,
        "wall_s": wall_s,
    }


# ---------------------------------------------------------------- for people


def _lines(result: dict[str, Any]) -> list[str]:
    recording, recorded, times = result["recording"], result["recorded"], result["step_times"]
    off = ", ".join(
        f"{kind} {100 * found['p50']:.1f}/{100 * found['p90']:.1f} %" for kind, found in times["error"].items()
    )
    rows = [("recorded", recorded)] + [(f"replayed, {one['policy']}", one) for one in result["replayed"]]
    width = max(len(label) + len(name) + 3 for label, one in rows for name in one["classes"] or [""])
    lines = [
        f"{recording['file']} ({recording['reason']}), written {recording['written']}: "
        f"{recording['seconds']:.1f} s of {result['model']} on {result['device']}",
        *_counts(recording["requests"]),
        f"run with {result['engine']['kv_blocks']} KV blocks, {result['engine']['max_num_seqs']} requests at once, "
        f"admission {result['admission']}"
        + (f", {result['scale']:g} times as fast" if result["scale"] != 1 else "")
        + (", each caller after his last answer" if result["closed"] else ""),
        f"step times: {times['source']}, off by (p50/p90) {off}; {times['host_ms']:.2f} ms of the host each",
        *(f"warning: {text}" for text in result["warnings"]),
        f"{'p50 / p99 in ms':<{width}}{'requests':>9}{'TTFT':>20}{'ITL':>18}{'E2E':>22}",
    ]
    for label, one in rows:
        for name, figures in one["classes"].items():
            ttft, itl, e2e = (_pair(figures[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))
            lines.append(f"{label + ' ' + name:<{width}}{figures['requests']:>9}{ttft:>20}{itl:>18}{e2e:>22}")
    for label, one in rows:
        lines.append(
            f"{label}: {one['steps']} steps, {one['preemptions']} preempted, "
            f"{100 * one['hit_ratio']:.1f} % of prompt tokens found{_not_in_rows(one)}"
        )
    return lines


def _counts(counts: dict[str, Any]) -> list[str]:
    """How the recorded requests ended, and what becomes of them."""
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts["outcomes"].items()))
    again = f"{counts['replayed']} run again"
    if counts["cut_short"]:
        again += f", {counts['cut_short']} of them cut short (no end is recorded: as many tokens as had come)"
    if counts["left_out"]:
        left = ", ".join(f"{number} {outcome}" for outcome, number in counts["left_out"].items())
        again += f"; left out, since no token came: {left}"
    return [f"{counts['recorded']} requests: {outcomes}", again]


def _not_in_rows(one: dict[str, Any]) -> str:
    """Of a replay, the requests that the rows of the table do not count."""
    words = [f"{one[what]} {what}" for what in ("left", "expired") if one.get(what)]
    words += [f"{number} refused ({reason})" for reason, number in one.get("refused", {}).items()]
    return f"; not in the rows: {', '.join(words)}" if words else ""


def _pair(found: dict[str, float]) -> str:
    return f"{found['p50']:.1f} / {found['p99']:.1f}" if found else "-"
