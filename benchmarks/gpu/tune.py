"""Tunes the decode step's products inside its CUDA graph, and writes what was found where the engine looks for it.

    python -m benchmarks.gpu.tune random:llama-3.1-8b --rows 1 8 16 --store src/firsttoken/kernels/tuning/h200.json

The best kernel alone is not the best in the graph, where the next one's first loads overlap its end: so one product's
config is changed at a time, the whole step captured again and timed, and the best kept; then the next product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decode_step import DecodeStep
from firsttoken.kernels.linear.config import LinearConfig, OpKind, row_bucket
from firsttoken.kernels.linear.tune import candidates
from firsttoken.kernels.paged_attention.gpu_config import DecodeConfig
from firsttoken.kernels.tuning import TunedFile, TunedLinear, read_tuned, write_tuned

Key = tuple[OpKind, int, int]


def compile_one(job: tuple[Key, int, LinearConfig, int]) -> None:
    """Compile a product's kernel into Triton's cache, in a process of its own."""
    from firsttoken.kernels.linear.small import Norm, Workspace, small_linear

    (kind, n, k), rows, config, parts = job

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
    workspace = Workspace.allocate(config.workspace_floats(n), config.tiles(n), torch.device("meta"))
    try:
        small_linear(meta(rows, k), meta(n, k), out, config=config, workspace=workspace, pdl=True, **extra)  # type: ignore[arg-type]
    except Exception as error:  # a candidate may not fit the hardware: the search passes it over
        print(f"  {kind} {n}x{k} {config}: {str(error).splitlines()[0]:.100}", flush=True)


def tune(step: DecodeStep, rows: int, deadline: float) -> dict[Key, LinearConfig]:
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
            for config in candidates(*key, rows):
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
    parser.add_argument("--seconds", type=float, default=120, help="for each number of rows")
    parser.add_argument("--attention", type=float, default=0, help="seconds for decode attention, 0 leaves it out")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--store", type=Path)
    arguments = parser.parse_args()
    step = DecodeStep(arguments.model, max(arguments.rows), arguments.context)
    gpu = torch.cuda.get_device_name()
    results: dict[int, dict[str, Any]] = {}
    tuned = []
    for rows in arguments.rows:
        jobs = [
            (key, rows, config, parts)
            for key in step.products()
            for config in candidates(*key, rows)
            for parts in step.parts(rows)[: 1 if key[0] == "residual" else None]
        ]
        began = time.monotonic()
        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            list(pool.map(compile_one, jobs, chunksize=4))
        print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.1f} s", flush=True)
        first = step.time(rows)
        found = tune(step, rows, time.monotonic() + arguments.seconds)
        last = statistics.median(step.time(rows) for _ in range(3))
        results[rows] = {"stored_ms": first, "tuned_ms": last, "without_pdl_ms": step.time(rows, pdl=False)}
        print(f"rows {rows}: {results[rows]}", flush=True)
        print(f"  without a part: {step.without_ms(rows)}", flush=True)
        if arguments.attention:
            results[rows]["attention"] = tune_attention(step, rows, time.monotonic() + arguments.attention)
        for (kind, n, k), config in found.items():
            tuned.append(TunedLinear(kind, n, k, row_bucket(rows), config))
    if arguments.output:
        document = {"gpu": gpu, "model": arguments.model, "context": arguments.context, "rows": results}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.store:
        old = read_tuned(arguments.store).linear if arguments.store.exists() else []
        new = {entry.key for entry in tuned}
        write_tuned(arguments.store, TunedFile(gpu, [entry for entry in old if entry.key not in new] + tuned))


if __name__ == "__main__":
    main()
