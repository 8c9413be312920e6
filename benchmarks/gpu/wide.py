"""int4 weights by rows as FP8: which way is the fastest for how many rows, and is it right? For an 8B and a 70B.

    python -m benchmarks.gpu.wide --output wide.json [--rows 64 256 512] [--seconds 150]

First products of odd sizes in wide tiles against float64 of what the kernel is to multiply, so only sums and the
result's rounding differ. Then each product with SiLU's gate or residual as a layer has it, in a CUDA graph over more
weights than the second-level cache holds: from nibbles, in wide tiles of each kind that suits the rows, and written as
FP8 first; beside them FP8 weights. Of a layer, ``us`` sums what `rounded_config` chooses, ``best_us`` the best of each.
Exits with 1 where a product is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor

from benchmarks.gpu.attention import graph_us
from benchmarks.gpu.quantized_files import weight_of
from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.config import (
    RoundedConfig,
    WideConfig,
    fp8_config,
    nibble_config,
    rounded_config,
)
from firsttoken.kernels.packed_linear.layout import BYTE_COLUMNS, PackedWeight, empty_packed, pack_fp8, unpack
from firsttoken.kernels.packed_linear.rounded import RoundedRows, round_rows, rounded_linear

# (n, k) of a layer's products: more than one shape, so that no rule is made of one alone.
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "8b": {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70b": {"qkv": (10240, 8192), "output": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
# More than an H200's second-level cache.
BYTES_IN_TURNS = 200 << 20

CONFIGS = (WideConfig(256, 3), WideConfig(128, 4), WideConfig(64, 4))
# Of each result's size and the mean of all: bfloat16's own rounding, and what the tensor cores keep of sums of FP8.
MOST_ERROR = 2**-6
GATED, RESIDUAL = ("gate_up",), ("output", "down")
Config = RoundedConfig | WideConfig


@dataclass(frozen=True)
class Problem:
    """A product of ``rows`` rows with int4 weights ``[n, k]`` and what a layer's ``product`` has after it."""

    n: int
    k: int
    rows: int
    config: Config
    product: str = ""
    group: int = 128
    zeros: bool = False


ODD = tuple(
    Problem(n, k, rows, config, group=group, zeros=zeros)
    for config in CONFIGS
    for n, k, rows, group, zeros in (
        (80, 448, 3, 64, False),
        (4112, 4096, 257, 128, False),
        (4112, 1152, 65, 128, True),
    )
) + tuple(Problem(4112, 1088, 300, config, group=64, zeros=True) for config in CONFIGS if config.stages != 3)


def configs(n: int, k: int, rows: int) -> dict[str, Config]:
    """From nibbles, as FP8, and tiles that take no more rows than there are, nor far less."""
    found: dict[str, Config] = {"nibbles": nibble_config(n, k, rows)} if rows <= 256 else {}
    wide = [one for one in CONFIGS if min(rows // 2, 128) <= one.block_m <= max(rows, 64)]
    return found | {"as_fp8": fp8_config(n, k, rows)} | {f"wide_{one.block_m}_{one.stages}": one for one in wide}


def epilogue(product: str, out: Tensor) -> dict[str, Any]:
    return {"gated": product in GATED} | ({"residual": out} if product in RESIDUAL else {})


def result(product: str, rows: int, n: int, device: str) -> Tensor:
    return torch.zeros(rows, n // 2 if product in GATED else n, dtype=torch.bfloat16, device=device)


def compile_one(problem: Problem) -> str | None:
    """On the meta device, in a process of its own."""
    from firsttoken.executor.ahead.target import compile_for

    compile_for(90)
    device = torch.device("meta")
    weight = empty_packed("int4", problem.n, problem.k, problem.group, device, zeros=problem.zeros)
    x = round_rows(torch.empty(problem.rows, problem.k, dtype=torch.bfloat16, device=device), weight)
    out = result(problem.product, problem.rows, problem.n, "meta")
    try:
        product_by(x, weight, out, problem.config, epilogue(problem.product, out))()
    except Exception as error:
        return f"{problem}: {str(error).splitlines()[0]:.120}"
    return None


def compile_ahead(compile_one: Callable[[Any], str | None], jobs: Sequence[Any], processes: int) -> list[str]:
    """``compile_one`` of each job in a process that never touches the GPU; what could not be compiled."""
    began = time.monotonic()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        failed = [word for word in pool.map(compile_one, jobs) if word is not None]
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.0f} s", *failed, sep="\n  ", flush=True)
    return failed


# ------------------------------------------------------------------------------------------------ right


def meant(rows: RoundedRows) -> Tensor:
    """Rounded rows of int4 with their columns in order, float64."""
    order = torch.tensor(BYTE_COLUMNS).argsort().to(rows.values.device)
    values = rows.values.float().view(rows.rows, -1, 64)[:, :, order].reshape(rows.rows, -1)
    return values[:, : rows.k].double() * rows.scales[:, None]


def scaled(weight: PackedWeight) -> Tensor:
    """int4 weights as the kernel multiplies them, float64: in e4m3, with a row's scale; columns in order."""
    assert weight.row_scales is not None
    n, k, group = weight.n, weight.k, weight.group
    scales = by_row(weight.scales, weight) / weight.row_scales[:, None]
    scales = scales.bfloat16().double().repeat_interleave(group, 1)
    zeros = 8.0 if weight.zeros is None else (by_row(weight.zeros, weight) - 128).double().repeat_interleave(group, 1)
    one = PackedWeight("int4", n, k, group, weight.words, torch.ones_like(weight.scales), weight.row_scales)
    nibbles = unpack(one).double() + 8
    less = ((-16.0 - zeros) * scales).half().double()
    return ((16 + nibbles) * scales + less).half().to(torch.float8_e4m3fn).double() * weight.row_scales[
        :, None
    ].double()


def by_row(arranged: Tensor, weight: PackedWeight) -> Tensor:
    """Scales of groups as ``[n, k / group]``, float32."""
    each = 256 // weight.group
    wide = arranged.float().permute(0, 2, 1, 3).reshape(-1, weight.chunks * each)
    return wide[: weight.n, : weight.k // weight.group]


def check(problem: Problem, device: str) -> dict[str, Any]:
    weight = weight_of(problem.n, problem.k, problem.group, device, zeros=problem.zeros)
    x = round_rows(torch.randn(problem.rows, problem.k, device=device).bfloat16() + 0.3, weight)
    out = result("", problem.rows, problem.n, device)
    run = product_by(x, weight, out, problem.config, {})
    run()
    first = out.clone()
    run()
    want = meant(x) @ scaled(weight).T
    error = float(((out.double() - want).abs() / (want.abs() + want.abs().mean())).max())
    apart = float((want - meant(x) @ unpack(weight).double().T).norm() / want.norm())
    same = torch.equal(first, out)
    found = {**asdict(problem), "config": to_builtins(problem.config), "error": round(error, 5), "same_bits": same}
    found |= {"rounding": round(apart, 5), "right": error <= MOST_ERROR and same}
    if not found["right"]:
        print("WRONG", found, flush=True)
    return found


# ------------------------------------------------------------------------------------------------ fast


def copies(nbytes: int) -> int:
    """Weights of ``nbytes`` that are read in turns, so that each comes from memory."""
    return BYTES_IN_TURNS // nbytes + 1


def timed(launches: Sequence[Callable[[], object]]) -> float | None:
    """Median microseconds of one launch, all of them in turns in a graph; None where the GPU hasn't the room."""

    def chain() -> None:
        for one in launches:
            one()

    try:
        return round(graph_us(chain, len(launches)), 2)
    except Exception as error:
        torch.cuda.synchronize()
        print(f"  not run: {str(error).splitlines()[0]:.120}", flush=True)
        return None


def product_by(
    x: RoundedRows, weight: PackedWeight, out: Tensor, config: Config, options: dict[str, Any]
) -> Callable[[], None]:
    m, (n, k) = x.rows, weight.shape
    if isinstance(config, WideConfig):
        floats, slots = config.workspace(config.divide(n, m, k))
    else:
        floats, slots = config.workspace_floats(n, m), config.tiles(n) * -(-m // config.block_m)
    workspace = Workspace.allocate(floats, slots, out.device)
    scratch = torch.empty(n * k, dtype=torch.uint8, device=out.device)
    return lambda: rounded_linear(x, weight, out, workspace=workspace, scratch=scratch, config=config, **options)


def measure(model: str, product: str, rows: int) -> dict[str, Any]:
    n, k = LAYERS[model][product]
    weights = [weight_of(n, k, 128, "cuda", zeros=False) for _ in range(copies(n * k // 2))]
    out = result(product, rows, n, "cuda")
    options = epilogue(product, out)
    x = round_rows(torch.randn(rows, k, device="cuda").bfloat16(), weights[0])
    us = {}
    for name, config in configs(n, k, rows).items():
        us[name] = timed([product_by(x, weight, out, config, options) for weight in weights])
    eight = pack_fp8(torch.randint(0, 64, (n, k), device="cuda").to(torch.float8_e4m3fn), torch.rand(n, device="cuda"))
    rounded = round_rows(torch.randn(rows, k, device="cuda").bfloat16(), eight)
    us["fp8_weights"] = timed([product_by(rounded, eight, out, fp8_config(n, k, rows), options)] * 2)
    chosen = rounded_config(n, k, rows, "int4")
    name = next(name for name, config in configs(n, k, rows).items() if config == chosen)
    ways = {way: one for way, one in us.items() if one is not None and way != "fp8_weights"}
    best = min(ways, key=lambda way: ways[way])
    tflops = round(2e-6 * rows * n * k / ways[best])
    print(f"{model} {product:8} {rows:5} rows: {us}; chosen {name}, best {best} ({tflops} TFLOP/s)", flush=True)
    found: dict[str, Any] = {"model": model, "product": product, "rows": rows, "us": us, "chosen": name, "best": best}
    return found | {"tflops_of_best": tflops}


def _shares(problem: Problem) -> int:
    config = problem.config
    return min(config.divide(problem.n, problem.rows, problem.k).split, 3) if isinstance(config, WideConfig) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 64, 128, 1024])
    parser.add_argument("--models", nargs="+", choices=tuple(LAYERS), default=["70b", "8b"])
    parser.add_argument("--seconds", type=float, default=150, help="start no further product after this long")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--compile-only", action="store_true", help="compile all for sm_90; needs no GPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    timed_ones = [
        Problem(n, k, rows, config, product)
        for model in options.models
        for rows in options.rows
        for product, (n, k) in LAYERS[model].items()
        for config in configs(n, k, rows).values()
    ]
    distinct = {(one.n, one.k, one.config, one.product, _shares(one)): one for one in (*ODD, *timed_ones)}
    failed = compile_ahead(compile_one, list(distinct.values()), options.processes)
    if options.compile_only:
        return 1 if failed else 0
    began = time.monotonic()
    checks = [check(problem, "cuda") for problem in ODD]
    print(f"{sum(one['right'] for one in checks)} of {len(checks)} products are right", flush=True)
    products = []
    for rows in options.rows:
        for model in options.models:
            for product in LAYERS[model]:
                if time.monotonic() - began < options.seconds:
                    products.append(measure(model, product, rows))
                    torch.cuda.empty_cache()
    layers = []
    for rows in options.rows:
        for model in options.models:
            those = [one for one in products if (one["model"], one["rows"]) == (model, rows)]
            if len(those) == len(LAYERS[model]):
                chosen = round(sum(one["us"][one["chosen"]] for one in those), 1)
                best = round(sum(one["us"][one["best"]] for one in those), 1)
                eight = round(sum(one["us"]["fp8_weights"] for one in those), 1)
                layers.append({"model": model, "rows": rows, "us": chosen, "best_us": best, "fp8_weights_us": eight})
                print(f"a layer of {model}, {rows} rows: {layers[-1]}", flush=True)
    if options.output:
        document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": layers}
        options.output.write_text(json.dumps(document | {"products": products, "checks": checks}, indent=1) + "\n")
    return 0 if all(one["right"] for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
