"""The products of 1 to 64 rows and the kernels beside them: right at odd shapes, and how near the memory's roof.

    python -m benchmarks.gpu.linear --output linear.json [--quick] [--models 8b 1b] [--rows 32 64] [--candidates 8]

Times are medians of CUDA graph replays with dependent launches; weights rotate over more than the L2 cache holds.
Alone in a chain of its like a kernel may rank differently than inside a decode step: tune there, look here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.gpu import linear_checks
from firsttoken.kernels.linear import LinearConfig, OpKind, row_bucket
from firsttoken.kernels.linear.tune import candidates
from firsttoken.kernels.rms_norm.triton import add_rms_norm
from firsttoken.kernels.silu_mul.triton import silu_mul
from firsttoken.kernels.tuning import linear_config

ROOF_TB_S = 4.5
_ROTATED_BYTES = 300 << 20
Shape = tuple[OpKind, int, int]
MODELS: dict[str, dict[str, Shape]] = {
    "8b": {
        "qkv": ("plain", 6144, 4096),
        "o": ("residual", 4096, 4096),
        "gate_up": ("gated", 28672, 4096),
        "down": ("residual", 4096, 14336),
        "head": ("head", 128256, 4096),
    },
    "1b": {
        "qkv": ("plain", 3072, 2048),
        "o": ("residual", 2048, 2048),
        "gate_up": ("gated", 16384, 2048),
        "down": ("residual", 2048, 8192),
        "head": ("head", 128256, 2048),
    },
}
Job = tuple[Shape, int, LinearConfig]
# Products with the number of norm parts and whether launches depend; or a chain: its rows and the latter.
Compilation = tuple[Job, int, bool] | tuple[int, bool]
_PARTS, _ODD_PARTS = 64, 5


def graph_us(launches: Callable[[int], object], count: int, replays: int = 7) -> float:
    """Median microseconds of one of ``count`` launches in a graph."""
    launches(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launches(i)
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return float(statistics.median(times[2:]))


def compile_one(what: Compilation) -> bool:
    """Compile a job's kernels in a process of its own; False where a config does not fit, which timing reports."""
    try:
        if len(what) == 2:
            linear_checks.Chain(what[0], "meta", layers=1).run(pdl=what[1])
        else:
            ((kind, n, k), rows, config), parts, pdl = what
            linear_checks.make(kind, rows, n, k, config, weights=None, parts=parts).run(pdl=pdl)
    except Exception:
        return False
    return True


def jobs_of(options: argparse.Namespace) -> list[tuple[str, str, Job]]:
    """(model, operation, job) of everything to time; a product's stored config comes first."""
    gpu = torch.cuda.get_device_name()
    found = []
    for model in options.models:
        for name, (kind, n, k) in MODELS[model].items():
            for rows in options.rows:
                configs = dict.fromkeys([linear_config(kind, n, k, rows, gpu), *candidates(kind, n, k, rows)])
                found += [(model, name, ((kind, n, k), rows, one)) for one in list(configs)[: options.candidates]]
    return found


def chain_rows(quick: bool) -> tuple[int, ...]:
    return (1, 8, 64) if quick else (1, 2, 8, 16, 32, 64)


def compile_all(options: argparse.Namespace, timed: list[Job]) -> None:
    """Compile what the checks and timings run, on all cores."""
    odd = [((kind, n, k), rows, one) for kind, rows, n, k, one in linear_checks.odd_products(options.quick)]
    jobs: list[tuple[Job, int, bool]] = [(job, _PARTS, True) for job in timed]
    jobs += [(job, _ODD_PARTS, False) for job in odd]
    # Numbers of rows in one bucket share a kernel.
    distinct = {(job[0], row_bucket(job[1]), job[2], parts): (job, parts, pdl) for job, parts, pdl in jobs}
    work: list[Compilation] = [(rows, pdl) for rows in chain_rows(options.quick) for pdl in (False, True)]
    work += distinct.values()
    workers = max(1, min(15, len(os.sched_getaffinity(0)) - 1))
    began = time.monotonic()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        bad = sum(not fine for fine in pool.map(compile_one, work, chunksize=2))
    print(f"compiled {len(work)} products and chains in {time.monotonic() - began:.1f} s, {bad} failed", flush=True)


def rotated_weights(n: int, k: int) -> list[Tensor]:
    copies = max(1, -(-_ROTATED_BYTES // (2 * n * k)))
    return [torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5) for _ in range(copies)]


def cublas_us(kind: OpKind, weights: list[Tensor], rows: int, launches: int) -> dict[str, float]:
    """The product by torch.mm: alone, and with the kernels that then stand in place of the epilogue."""
    n, k = weights[0].shape
    x, out, h = (torch.randn(rows, size, device="cuda").bfloat16() for size in (k, n, n))
    half, gain = torch.empty(rows, n // 2, device="cuda", dtype=torch.bfloat16), torch.ones(n, device="cuda")

    def product(i: int) -> None:
        torch.mm(x, weights[i % len(weights)].T, out=out)

    def whole(i: int) -> None:
        if kind == "head":
            torch.mm(x, weights[i % len(weights)].T, out_dtype=torch.float32).argmax(-1)
            return
        product(i)
        if kind == "gated":
            silu_mul(out, half)
        elif kind == "residual":
            add_rms_norm(h, out, gain, 1e-5, out)

    return {"cublas_us": graph_us(product, launches), "cublas_whole_us": graph_us(whole, launches)}


def time_products(planned: list[tuple[str, str, Job]], deadline: float) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    present: tuple[Shape, list[Tensor]] | None = None
    cublas: dict[tuple[Shape, int], dict[str, float]] = {}
    for model, name, job in planned:
        shape, rows, config = job
        if time.monotonic() > deadline:
            print("stopped: out of time", flush=True)
            break
        if present is None or present[0] != shape:
            present = None  # free the old weights first
            present = shape, rotated_weights(*shape[1:])
        weights = present[1]
        # At least 300 us a graph, so that its own start is small beside it.
        launches = len(weights) * max(1, -(-16 // len(weights)))
        launches = min(launches, 64) if len(weights) > 1 else 3
        if (shape, rows) not in cublas:
            cublas[shape, rows] = cublas_us(shape[0], weights, rows, launches)
        results.append(
            {"model": model, "op": name, "n": shape[1], "k": shape[2], "rows": rows}
            | cublas[shape, rows]
            | {"config": msgspec.to_builtins(config)}
            | time_one(job, weights, launches)
        )
    return results


def time_one(job: Job, weights: list[Tensor], launches: int) -> dict[str, Any]:
    (kind, n, k), rows, config = job
    try:
        case = linear_checks.make(kind, rows, n, k, config, weights=weights, parts=_PARTS)
        us = graph_us(lambda i: case.run(copy=i, pdl=True), launches)
    except Exception as error:  # out of resources: the config is no candidate here
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"}
    gigabytes = 2e-9 * n * k
    return {"us": us, "tb_s": gigabytes / us * 1e3, "roof_us": gigabytes / ROOF_TB_S * 1e3}


def print_products(results: list[dict[str, Any]]) -> None:
    print(f"{'':17}{'rows':>5}{'roof':>8}{'cuBLAS':>8}{'+ rest':>8}{'stored':>8}{'best':>8}{'TB/s':>6}  best config")
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["model"], result["op"], result["rows"]), []).append(result)
    for (model, op, rows), group in groups.items():
        timed = sorted((one for one in group if "us" in one), key=lambda one: one["us"])
        if not timed:
            print(f"{model:5}{op:12}{rows:5}  {group[0].get('error')}")
            continue
        best, stored = timed[0], group[0].get("us", float("nan"))
        config = " ".join(f"{key}={value}" for key, value in best["config"].items())
        figures = "".join(f"{best[name]:8.1f}" for name in ("roof_us", "cublas_us", "cublas_whole_us"))
        figures += f"{stored:8.1f}{best['us']:8.1f}{best['tb_s']:6.2f}"
        print(f"{model:5}{op:12}{rows:5}{figures}  {config}")


def time_rows() -> list[dict[str, Any]]:
    """The kernels between cuBLAS products at 2048 rows; a copy moves 4.2 TB/s."""
    rows, width, wide = 2048, 4096, 14336
    h, y, out = ([torch.randn(rows, width, device="cuda").bfloat16() for _ in range(8)] for _ in range(3))
    gain = torch.ones(width, device="cuda")
    gate_up = [torch.randn(rows, 2 * wide, device="cuda").bfloat16() for _ in range(3)]
    half = torch.empty(rows, wide, device="cuda", dtype=torch.bfloat16)
    timed = {
        "add_rms_norm": (graph_us(lambda i: add_rms_norm(h[i % 8], y[i % 8], gain, 1e-5, out[i % 8]), 16), 8 * width),
        "norm alone": (graph_us(lambda i: add_rms_norm(h[i % 8], None, gain, 1e-5, out[i % 8]), 16), 4 * width),
        "silu_mul": (graph_us(lambda i: silu_mul(gate_up[i % 3], half), 9), 6 * wide),
    }
    results = [
        {"op": name, "rows": rows, "us": us, "tb_s": 1e-6 * rows * bytes_a_row / us}
        for name, (us, bytes_a_row) in timed.items()
    ]
    for result in results:
        print(f"{result['op']:14}[{rows} rows]  {result['us']:6.1f} us  {result['tb_s']:.2f} TB/s", flush=True)
    return results


def check(quick: bool) -> dict[str, Any]:
    """Every kernel against float64; raises SystemExit at the end of the run when one is wrong."""
    worst: dict[str, float] = {}
    failures = []
    for kind, rows, n, k, config in linear_checks.odd_products(quick):
        weight = torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5)
        excess = linear_checks.check_product(
            linear_checks.make(kind, rows, n, k, config, weights=[weight], parts=_ODD_PARTS)
        )
        worst[f"{config.kernel} {kind}"] = max(worst.get(f"{config.kernel} {kind}", 0.0), excess)
        if not excess <= 1.0:
            failures.append(f"{kind} {rows} x {n} x {k} {config}: {excess:.2f} times what rounding allows")
    for name, excess in linear_checks.check_rows().items():
        worst[name] = excess
        if not excess <= 1.0:
            failures.append(f"{name}: {excess:.2f} times what rounding allows")
    replays = 100 if quick else 1000
    for rows in chain_rows(quick):
        wrong = linear_checks.check_chain(rows, replays)
        failures += [f"chain of {rows} rows: {wrong} of {replays} replays differ from plain launches"] if wrong else []
    print("errors, 1.0 = rounding:", " ".join(f"{name} {value:.2f};" for name, value in worst.items()))
    print(f"{len(failures)} checks failed", *failures, sep="\n  ", flush=True)
    return {"excess": worst, "failures": failures, "replays": replays}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="fewer checks, rows 1 and 8, three configs each")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["8b", "1b"])
    parser.add_argument("--rows", nargs="+", type=int, default=None)
    parser.add_argument("--candidates", type=int, default=None, help="configs timed for each product")
    parser.add_argument("--seconds", type=float, default=55.0, help="start no further timing after this long")
    options = parser.parse_args()
    options.rows = options.rows or ([1, 8] if options.quick else [1, 8, 16, 32, 64])
    options.candidates = options.candidates or (3 if options.quick else 8)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    began = time.monotonic()
    planned = jobs_of(options)
    compile_all(options, [job for _, _, job in planned])
    checks = check(options.quick)
    print(f"checked after {time.monotonic() - began:.1f} s", flush=True)
    rows = time_rows()
    products = time_products(planned, began + options.seconds)
    print_products(products)
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    options.output.write_text(
        json.dumps(head | {"checks": checks, "row_kernels": rows, "products": products}, indent=1)
    )
    return 1 if checks["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
