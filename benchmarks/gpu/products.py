"""How well cuBLAS computes a layer's products at each number of token rows: which sizes steps should be padded to.

    python -m benchmarks.gpu.products [--output products.json]

For each number of rows the four products of an 8B's layer, each in a CUDA graph over two weights in turns: microseconds
and TFLOP/s, their sum a layer, and the time a token.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import graph_us, random

# (n, k) of Llama-3.1-8B's.
PRODUCTS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS: tuple[int, ...] = (
    128,
    256,
    320,
    384,
    448,
    512,
    576,
    640,
    704,
    768,
    832,
    896,
    960,
    1024,
    1088,
    1152,
    1280,
    1536,
    1792,
    2048,
)
ROWS += (2112, 2560, 3072, 4096, 8192)


def multiply(x: Tensor, weights: list[Tensor], out: Tensor) -> None:
    for weight in weights:
        torch.mm(x, weight.T, out=out)


def measure(rows: int, weights: dict[str, list[Tensor]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": rows, "products": {}}
    flops = us = 0.0
    for name, (n, k) in PRODUCTS.items():
        x, out = random(rows, k), random(rows, n)
        one = graph_us(partial(multiply, x, weights[name] * 2, out), 4, 5)
        found["products"][name] = {"us": round(one, 1), "tflops": round(2e-6 * rows * n * k / one, 1)}
        us, flops = us + one, flops + 2e-6 * rows * n * k
    found |= {"layer_us": round(us, 1), "tflops": round(flops / us, 1), "us_per_token": round(us / rows, 4)}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    weights = {name: [random(n, k, scale=0.02) for _ in range(2)] for name, (n, k) in PRODUCTS.items()}
    found = [measure(rows, weights) for rows in ROWS]
    document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": "llama-3.1-8b"}
    if arguments.output:
        arguments.output.write_text(json.dumps(document | {"sizes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
