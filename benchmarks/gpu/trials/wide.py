"""Are `wide_int4`'s tiles right on a GPU, and faster than the kernels in use? Products of an 8B and a 70B.

    python -m benchmarks.gpu.trials.wide --output wide.json [--rows 64 256 512] [--seconds 150]

First products of odd sizes against float64 (of the rounded rows and weights as they are, so only sums and the result's
rounding differ). Then each product with SiLU's gate or residual as a layer has it, in a CUDA graph over more weights
than the second-level cache holds: the kernel in use, int4 written as FP8 first, FP8 weights, and wide tiles of each
kind that suits the rows. Of a layer, ``now_us`` sums the faster of the first two, ``best_us`` the best wide tiles.
Exits with 1 where a product is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.quantized_files import weight_of
from benchmarks.gpu.trials.timing import LAYERS, compile_ahead, copies, timed
from benchmarks.gpu.trials.wide_int4 import Division, WideConfig, divide, wide_int4_linear, with_room
from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.config import RoundedConfig, rounded_config
from firsttoken.kernels.packed_linear.layout import BYTE_COLUMNS, PackedWeight, empty_packed, pack_fp8, unpack
from firsttoken.kernels.packed_linear.rounded import RoundedRows, round_rows, rounded_linear

CONFIGS = (
    WideConfig(1, 64, 4), WideConfig(2, 64, 2), WideConfig(1, 128, 2), WideConfig(1, 128, 1), WideConfig(1, 64, 2),
    WideConfig(2, 64, 1), WideConfig(1, 64, 1),
)  # fmt: skip
# Of each result's size and the mean of all: bfloat16's own rounding, and what the tensor cores keep of sums of FP8.
MOST_ERROR = 2**-6
GATED, RESIDUAL = ("gate_up",), ("output", "down")


@dataclass(frozen=True)
class Problem:
    """A product of ``rows`` rows with int4 weights ``[n, k]`` and what a layer's ``product`` has after it."""

    n: int
    k: int
    rows: int
    config: WideConfig
    product: str = ""
    group: int = 128
    zeros: bool = False

    @property
    def division(self) -> Division:
        return divide(self.config.tiles(self.n, self.rows), self.k // self.group)


ODD = tuple(
    Problem(n, k, rows, config, group=group, zeros=zeros)
    for config in CONFIGS
    for n, k, rows, group, zeros in ((80, 448, 3, 64, True), (4112, 4096, 257, 128, False))
)


def configs(rows: int) -> list[WideConfig]:
    """Those whose tiles take no more rows than there are, nor far less."""
    return [one for one in CONFIGS if min(rows // 2, 128) <= one.rows <= max(rows, 64)]


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
        product_by(with_room(x, problem.config), weight, out, problem.config, epilogue(problem.product, out))()
    except Exception as error:
        return f"{problem}: {str(error).splitlines()[0]:.120}"
    return None


# ------------------------------------------------------------------------------------------------ right


def meant(rows: RoundedRows) -> Tensor:
    """Rounded rows of int4 with their columns in order, float64."""
    order = torch.tensor(BYTE_COLUMNS).argsort().to(rows.values.device)
    values = rows.values.float().view(rows.rows, -1, 64)[:, :, order].reshape(rows.rows, -1)
    return values[:, : rows.k].double() * rows.scales[:, None]


def check(problem: Problem, device: str) -> dict[str, Any]:
    weight = weight_of(problem.n, problem.k, problem.group, device, zeros=problem.zeros)
    x = round_rows(torch.randn(problem.rows, problem.k, device=device).bfloat16() + 0.3, weight)
    out = result("", problem.rows, problem.n, device)
    run = product_by(with_room(x, problem.config), weight, out, problem.config, {})
    run()
    first = out.clone()
    run()
    want = meant(x) @ unpack(weight).double().T
    error = float(((out.double() - want).abs() / (want.abs() + want.abs().mean())).max())
    same = torch.equal(first, out)
    found = {**asdict(problem), "error": round(error, 5), "same_bits": same, "right": error <= MOST_ERROR and same}
    if not found["right"]:
        print("WRONG", found, flush=True)
    return found


# ------------------------------------------------------------------------------------------------ fast


def product_by(
    x: RoundedRows, weight: PackedWeight, out: Tensor, config: WideConfig, options: dict[str, Any]
) -> Callable[[], None]:
    division = divide(config.tiles(weight.n, x.rows), weight.k // weight.group)
    workspace = Workspace.allocate(*division.workspace(config), out.device)
    return lambda: wide_int4_linear(
        x, weight, out, workspace=workspace, config=config, division=division, **options
    )  # fmt: skip


def in_use(
    x: RoundedRows, weight: PackedWeight, out: Tensor, config: RoundedConfig, options: dict[str, Any]
) -> Callable[[], None]:
    m, (n, k) = x.rows, weight.shape
    workspace = Workspace.allocate(
        config.workspace_floats(n, m), config.tiles(n) * -(-m // config.block_m), out.device
    )  # fmt: skip
    scratch = torch.empty(n * k, dtype=torch.uint8, device=out.device)
    return lambda: rounded_linear(x, weight, out, workspace=workspace, scratch=scratch, config=config, **options)


def measure(model: str, product: str, rows: int) -> dict[str, Any]:
    n, k = LAYERS[model][product]
    weights = [weight_of(n, k, 128, "cuda", zeros=False) for _ in range(copies(n * k // 2))]
    x = torch.randn(rows, k, device="cuda").bfloat16()
    out = result(product, rows, n, "cuda")
    options = epilogue(product, out)
    plain = round_rows(x, weights[0])
    found: dict[str, Any] = {"model": model, "product": product, "rows": rows}
    for name, format in (("nibbles", "int4"), ("as_fp8", "fp8")):
        # The rule takes int4 from its nibbles for up to 256 rows only.
        config = rounded_config(n, k, min(rows, 256) if format == "int4" else rows, format)
        found[f"{name}_us"] = timed([in_use(plain, weight, out, config, options) for weight in weights])
    eight = pack_fp8(torch.randint(0, 64, (n, k), device="cuda").to(torch.float8_e4m3fn), torch.rand(n, device="cuda"))
    fp8 = in_use(round_rows(x, eight), eight, out, rounded_config(n, k, rows, "fp8"), options)
    found["fp8_weights_us"] = timed([fp8] * 2)
    found["wide"] = []
    for config_of_tiles in configs(rows):
        room = with_room(plain, config_of_tiles)
        us = timed([product_by(room, weight, out, config_of_tiles, options) for weight in weights])
        tflops = None if us is None else round(2e-6 * rows * n * k / us, 0)
        found["wide"].append({"config": asdict(config_of_tiles), "us": us, "tflops": tflops})
    ran = [one for one in found["wide"] if one["us"] is not None]
    best = min(ran, key=lambda one: one["us"]) if ran else None
    found["now_us"] = min(found["nibbles_us"] or 1e9, found["as_fp8_us"] or 1e9)
    found["best_us"] = found["now_us"] if best is None else best["us"]
    print(
        f"{model} {product:8} {rows:5} rows: nibbles {found['nibbles_us']}, as FP8 {found['as_fp8_us']}, FP8 weights "
        f"{found['fp8_weights_us']}, wide {best}", flush=True,
    )  # fmt: skip
    return found


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
        for config in configs(rows)
    ]
    # The number of rows decides a kernel only by how its tiles are divided.
    distinct = {(one.n, one.k, one.config, one.product, one.division.split): one for one in (*ODD, *timed_ones)}
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
                now, best = (round(sum(one[name] for one in those), 1) for name in ("now_us", "best_us"))
                layers.append({"model": model, "rows": rows, "now_us": now, "best_us": best})
                print(f"a layer of {model}, {rows} rows: {now} us now, {best} us by wide tiles", flush=True)
    if options.output:
        document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": layers}
        options.output.write_text(json.dumps(document | {"products": products, "checks": checks}, indent=1) + "\n")
    return 0 if all(one["right"] for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
