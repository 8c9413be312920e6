"""What ``simulate`` and ``frontier`` share on the command line: the simulated engine, its targets, and load shapes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from firsttoken.cli.bench_load import DEFAULT_MIX
from firsttoken.cli.bench_options import duration_ms, natural_number, positive_number
from firsttoken.cli.options import positive_int
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ClassTargets, ServiceClass, Targets

if TYPE_CHECKING:
    from firsttoken.bench.arrivals import Mix
    from firsttoken.simulate.gpu import GPU, StepTable
    from firsttoken.simulate.run import EngineShape
    from firsttoken.simulate.workload import Burst, Phase

GPU_DEFAULTS = {"gpu": "h200", "shape": "llama-3.1-8b"}
SHARES_TOGETHER = 1e-6  # how far shares of classes may be from 1 together


# ---------------------------------------------------------------- the engine


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the simulated engine")
    for name, default in GPU_DEFAULTS.items():
        group.add_argument(f"--{name}", metavar="NAME", help=f"whose measured steps (default: {default})")
    group.add_argument("--steps", type=Path, metavar="FILE", help="a result of bench steps instead")
    group.add_argument(
        "--sustained",
        choices=("on", "off"),
        default="on",
        help="stretch steps as an engine under load was measured to, and let the host's work take time (default: on)",
    )
    group.add_argument(
        "--kv-blocks", type=positive_int, metavar="N", help="KV blocks of 16 tokens (default: what the GPU has)"
    )
    group.add_argument(
        "--kv-eviction", default="default", metavar="POLICY", help="what the KV cache evicts first, as in serve"
    )
    group.add_argument(
        "--max-num-seqs", type=positive_int, default=64, metavar="N", help="most requests at once (default: 64)"
    )
    group.add_argument(
        "--max-model-len", type=positive_int, default=131072, metavar="N", help="longest request (default: 131072)"
    )


def find_gpu(options: argparse.Namespace) -> GPU:
    """Raises `ConfigError`, and `OSError` for a file that cannot be read."""
    from firsttoken.simulate.gpu import model_gpu

    return model_gpu(_table(options), sustained=options.sustained == "on")


def engine_shape(options: argparse.Namespace, gpu: GPU) -> EngineShape:
    """Raises `ConfigError`."""
    from firsttoken.devices.cuda import POLICY
    from firsttoken.simulate.run import EngineShape

    kv_blocks = options.kv_blocks or gpu.table.kv_blocks
    if not kv_blocks:
        raise ConfigError(f"{options.steps} does not say how many KV blocks there are: give --kv-blocks")
    return EngineShape(
        kv_blocks=kv_blocks,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        in_flight=POLICY.in_flight,
        host_ms=gpu.sustained.host_ms,
        eviction=options.kv_eviction,
    )


def engine_head(gpu: GPU, engine: EngineShape) -> dict[str, Any]:
    """The part of a result's head that says what was simulated."""
    sustained = gpu.sustained
    return {
        "device_name": gpu.table.device_name,
        "model": gpu.table.model,
        "kv_blocks": engine.kv_blocks,
        "kv_eviction": engine.eviction,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": engine.max_model_len,
        "in_flight": engine.in_flight,
        "sustained": {
            "decode": sustained.decode,
            "mixed": sustained.mixed,
            "prefill": sustained.prefill,
            "host_ms": sustained.host_ms,
        },
    }


def engine_line(head: dict[str, Any], error: dict[str, dict[str, float]]) -> str:
    """The same for people, with how far step times are off."""
    sustained = head["sustained"]
    stretched = ", ".join(f"{kind} x {sustained[kind]:g}" for kind in ("decode", "mixed", "prefill"))
    off = ", ".join(f"{kind} {100 * found['p50']:.1f}/{100 * found['p90']:.1f} %" for kind, found in error.items())
    return (
        f"{head['kv_blocks']} KV blocks, {head['max_num_seqs']} requests at once; steps under load: {stretched}, "
        f"{sustained['host_ms']:g} ms of the host each; step times are off by (p50/p90) {off}"
    )


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


# ---------------------------------------------------------------- targets


def add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-ttft", type=duration_ms, metavar="TIME", help="for the first token, as in 80ms")
    parser.add_argument("--target-itl", type=duration_ms, metavar="TIME", help="for the gaps, as in 20ms")
    parser.add_argument("--targets", type=Path, metavar="FILE", help="of each service class, as serve reads them")


def find_targets(options: argparse.Namespace) -> Targets:
    """Of all classes alike, or of the file. Raises `ConfigError`."""
    from firsttoken.core.targets_file import read_targets

    alike = {
        name: value
        for name, value in (("ttft_p99", options.target_ttft), ("itl_p99", options.target_itl))
        if value is not None
    }
    if options.targets is not None:
        if alike:
            raise ConfigError("--targets has the targets of each class: leave out --target-ttft and --target-itl")
        return read_targets(options.targets)
    defaults = Targets()
    return Targets(p0=_promised(defaults.p0, alike), p1=_promised(defaults.p1, alike), p2=_promised(defaults.p2, alike))


def _promised(default: ClassTargets, alike: dict[str, float]) -> ClassTargets:
    """A queue's bound that leaves no time for the first token is dropped: nobody asked for it."""
    ttft, queue = alike.get("ttft_p99"), default.max_queue
    fits = ttft is None or queue is None or queue < ttft
    return msgspec.structs.replace(default, **alike, max_queue=queue if fits else None)


def targets_head(options: argparse.Namespace) -> dict[str, Any]:
    """The part of a result's head that says what was promised."""
    file = None if options.targets is None else options.targets.name
    return {"ttft_ms": options.target_ttft, "itl_ms": options.target_itl, "file": file}


# ---------------------------------------------------------------- loads


def find_mix(text: str | None) -> Mix:
    """Raises `ConfigError`."""
    from firsttoken.bench.arrivals import Mix

    try:
        return Mix.parse(text or DEFAULT_MIX)
    except ValueError as error:
        raise ConfigError(f"--mix: {error}") from None


def number_list(text: str) -> list[float]:
    """Numbers above 0 from ``10,20,40``."""
    return [positive_number(part) for part in text.split(",")]


def phase_list(text: str) -> list[Phase]:
    """From ``5:60,40:60``: requests a second, and for how many seconds."""
    from firsttoken.simulate.workload import Phase

    return [Phase(positive_number(rate), positive_number(seconds)) for rate, seconds in _pairs(text, "5:60,40:60")]


def burst_list(text: str) -> list[Burst]:
    """From ``32:10,32:10``: so many requests at once, after so many seconds without any."""
    from firsttoken.simulate.workload import Burst

    return [Burst(positive_int(count), natural_number(idle)) for count, idle in _pairs(text, "32:10,32:10")]


def class_shares(text: str) -> dict[ServiceClass, float]:
    """From ``p0:0.2,p2:0.8``."""
    names = {service.name.lower(): service for service in ServiceClass}
    shares: dict[ServiceClass, float] = {}
    for name, share in _pairs(text, "p0:0.2,p2:0.8"):
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r:.80} is no class: known are {', '.join(names)}")
        if names[name] in shares:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        shares[names[name]] = natural_number(share)
    if abs(sum(shares.values()) - 1) > SHARES_TOGETHER:
        raise argparse.ArgumentTypeError(f"the shares of {text!r:.80} are {sum(shares.values()):g} together, not 1")
    return shares


def _pairs(text: str, example: str) -> list[tuple[str, str]]:
    pairs = [part.split(":") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be written as in {example}")
    return [(first, second) for first, second in pairs]
