"""Tunes the decode step's products inside its CUDA graph, and writes what was found where the engine looks for it.

    python -m benchmarks.gpu.tune random:llama-3.1-8b --rows 1 8 16 --store src/firsttoken/kernels/tuning/h200.json
    python -m benchmarks.gpu.tune random:llama-3.1-8b --quantization fp8 --rows 1 --store h200.json

The best kernel alone is not the best in the graph, where the next one's first loads overlap its end: so one product's
config is changed at a time, the whole step captured again and timed, and the best kept; then the next product.
One row of FP8 weights is tried on the CUDA cores, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.decode_step import DecodeStep
from firsttoken.kernels.linear.config import LinearConfig, OpKind, row_bucket
from firsttoken.kernels.linear.tune import candidates
from firsttoken.kernels.packed_linear.config import PackedConfig
from firsttoken.kernels.packed_linear.layout import PackedFormat, empty_packed
from firsttoken.kernels.packed_linear.one_row import fp8_row_linear
from firsttoken.kernels.packed_linear.small import packed_linear
from firsttoken.kernels.packed_linear.tune import candidates as packed_candidates
from firsttoken.kernels.packed_linear.tune import row_candidates
from firsttoken.kernels.paged_attention.gpu_config import DecodeConfig
from firsttoken.kernels.tuning import TunedFile, TunedLinear, TunedPacked, read_tuned, write_tuned
from firsttoken.models.fused import AnyConfig

Key = tuple[OpKind, int, int]
# Of packed weights, for each product.
MOST_PACKED = 28


@dataclass(frozen=True)
class Job:
    """A kernel to compile: ``parts`` sums of squares are read by its norm; ``format`` and ``group`` of packed weights,
    None for bfloat16."""

    key: Key
    rows: int
    config: AnyConfig
    parts: int
    format: PackedFormat | None = None
    group: int = 0


def compile_one(job: Job) -> None:
    """Compile a product's kernel into Triton's cache, in a process of its own."""
    from firsttoken.kernels.linear.small import Norm, Workspace, small_linear

    (kind, n, k), rows, config, parts = job.key, job.rows, job.config, job.parts

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    floats = torch.float32
    extra: dict[str, object] = {}
    out = meta(rows, n // 2 if kind == "gated" else n, dtype=floats if kind == "head" else torch.bfloat16)
    if kind != "residual":
        extra["norm"] = Norm(meta(rows, parts, dtype=floats), 1e-5, k)
    if kind == "gated":
        extra["gated"] = True
    if kind == "head":
        tiles = config.tiles(n)
        extra["best"] = meta(rows, tiles, dtype=floats), meta(rows, tiles, dtype=torch.int32)
    if kind == "residual":
        extra |= {
            "residual": out,
            "next_gain": meta(n, dtype=floats),
            "scaled_out": meta(rows, n),
            "ssq_out": meta(rows, config.tiles(n), dtype=floats),
        }
    device = torch.device("meta")
    try:
        if job.format is not None:
            weight = empty_packed(job.format, n, k, job.group, device)
            multiply: Any = packed_linear if isinstance(config, PackedConfig) else fp8_row_linear
            multiply(meta(rows, k), weight, out, config=config, pdl=True, **extra)
        else:
            assert isinstance(config, LinearConfig)
            workspace = Workspace.allocate(config.workspace_floats(n), config.tiles(n), device)
            small_linear(meta(rows, k), meta(n, k), out, config=config, workspace=workspace, pdl=True, **extra)  # type: ignore[arg-type]
    except Exception as error:  # a candidate may not fit the hardware: the search passes it over
        print(f"  {kind} {n}x{k} {config}: {str(error).splitlines()[0]:.100}", flush=True)


def candidates_of(step: DecodeStep, key: Key, rows: int) -> Sequence[AnyConfig]:
    weight = step.packed(*key)
    if weight is None:
        return candidates(*key, rows)
    found: list[AnyConfig] = [*packed_candidates(*key[1:], rows, weight.format)[:MOST_PACKED]]
    if rows == 1 and weight.format == "fp8":
        found += row_candidates(key[2])
    return found


def jobs(step: DecodeStep, rows: int) -> list[Job]:
    """All that the search may launch."""
    found = []
    for key in step.products():
        weight = step.packed(*key)
        for config in candidates_of(step, key, rows):
            for parts in step.parts(rows)[: 1 if key[0] == "residual" else None]:
                format, group = (None, 0) if weight is None else (weight.format, weight.group)
                found.append(Job(key, rows, config, parts, format, group))
    return found


def tune(step: DecodeStep, rows: int, deadline: float) -> dict[Key, AnyConfig]:
    """Coordinate descent over the step's products, those that take longest first."""
    keys = sorted(step.products(), key=lambda key: -key[1] * key[2])
    best_ms = step.time(rows)
    if best_ms == float("inf"):
        raise SystemExit("the step does not run with the stored configs: see the error above")
    print(f"rows {rows}: {best_ms:.4f} ms with the stored configs", flush=True)
    for sweep in range(2):
        before = best_ms
        for key in keys:
            chosen = step.choose(*key, rows)
            for config in candidates_of(step, key, rows):
                if config == chosen or time.monotonic() > deadline:
                    continue
                ms = step.time(rows, {(*key, row_bucket(rows)): config})
                if ms < best_ms * 0.9985:
                    best_ms, chosen = ms, config
            step.overrides[(*key, row_bucket(rows))] = chosen
            print(f"  {key}: {chosen} -> {best_ms:.4f} ms", flush=True)
        if best_ms > before * 0.998 or time.monotonic() > deadline:
            break
        print(f"  sweep {sweep} done", flush=True)
    return {key: step.choose(*key, rows) for key in keys}


def attention_trials() -> list[DecodeConfig]:
    """Divisions of decode attention worth measuring at few rows."""
    trials = []
    for tile, splits, warps, dot in product((32, 64, 128), (4, 8, 16, 32), (2, 4), (True, False)):
        if tile * splits <= 2048 and (dot or tile <= 64):
            trials.append(DecodeConfig(block_tokens=tile, splits=splits, min_split=tile, warps=warps, dot=dot))
    return trials


def tune_attention(step: DecodeStep, rows: int, deadline: float) -> dict[str, float]:
    """Milliseconds of the step by the division of its attention, the best first."""
    found: dict[DecodeConfig | None, float] = {None: step.time(rows)}
    for trial in attention_trials():
        if time.monotonic() < deadline:
            found[trial] = step.time(rows, attention=trial)
    best = sorted(found, key=lambda trial: found[trial])
    for one in best[:6]:
        print(f"  attention {found[one]:.4f} ms: {one or 'as chosen now'}", flush=True)
    print(f"  as chosen now: {found[None]:.4f} ms", flush=True)
    return {str(trial): found[trial] for trial in best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--quantization", choices=("none", "int4", "fp8"), default="none")
    parser.add_argument("--seconds", type=float, default=120, help="for each number of rows")
    parser.add_argument("--attention", type=float, default=0, help="seconds for decode attention, 0 leaves it out")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--store", type=Path)
    arguments = parser.parse_args()
    step = DecodeStep(arguments.model, max(arguments.rows), arguments.context, arguments.quantization)
    gpu = torch.cuda.get_device_name()
    results: dict[int, dict[str, Any]] = {}
    tuned: list[TunedLinear] = []
    packed: list[TunedPacked] = []
    for rows in arguments.rows:
        work = jobs(step, rows)
        began = time.monotonic()
        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            list(pool.map(compile_one, work, chunksize=2))
        print(f"compiled {len(work)} kernels in {time.monotonic() - began:.1f} s", flush=True)
        first = step.time(rows)
        found = tune(step, rows, time.monotonic() + arguments.seconds)
        last = statistics.median(step.time(rows) for _ in range(3))
        results[rows] = {"stored_ms": first, "tuned_ms": last, "without_pdl_ms": step.time(rows, pdl=False)}
        print(f"rows {rows}: {results[rows]}", flush=True)
        print(f"  without a part: {step.without_ms(rows)}", flush=True)
        if arguments.attention:
            results[rows]["attention"] = tune_attention(step, rows, time.monotonic() + arguments.attention)
        results[rows]["configs"] = [[*key, msgspec.to_builtins(config)] for key, config in found.items()]
        for (kind, n, k), config in found.items():
            weight = step.packed(kind, n, k)
            if isinstance(config, PackedConfig):
                assert weight is not None
                packed.append(TunedPacked(kind, n, k, row_bucket(rows), weight.format, config=config))
            elif weight is not None:
                packed.append(TunedPacked(kind, n, k, row_bucket(rows), weight.format, row=config))
            else:
                tuned.append(TunedLinear(kind, n, k, row_bucket(rows), config))
    if arguments.output:
        document = {"gpu": gpu, "model": arguments.model, "quantization": arguments.quantization}
        document |= {"context": arguments.context, "rows": results}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.store:
        old = read_tuned(arguments.store) if arguments.store.exists() else TunedFile(gpu, [])
        new = {*(entry.key for entry in tuned), *(entry.key for entry in packed)}
        tuned += [entry for entry in old.linear if entry.key not in new]
        packed += [entry for entry in old.packed if entry.key not in new]
        write_tuned(arguments.store, TunedFile(gpu, tuned, packed))


if __name__ == "__main__":
    main()
