"""Times the CPU's linears by number of rows: in full, and the forms of four and eight bits. Figures of
docs/quantization-cpu.md.

    python -m benchmarks.cpu_linear smollm2-135m llama-3-8b --output benchmarks/results/cpu/linear.json

All matrices of a model's layers have weights of their own, as many as a step reads; the forms take turns, so what else
the machine does falls on all of them. With ``--threads 1`` it is the thread's own time that counts, which others on the
machine change little; with more it is the time on the wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firsttoken.cli import report
from firsttoken.quantization import StoredTensor, linear_method
from firsttoken.quantization.linear import ByRows, Linear

# (N, K) of a layer's products, and how many layers are timed: those of a small model, one or two of a large one.
SHAPES = {
    "smollm2-135m": (((960, 576), (576, 576), (3072, 576), (576, 1536)), 30),
    "smollm2-135m-head": (((49152, 576),), 1),
    "llama-3.2-1b": (((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)), 2),
    "llama-3-8b": (((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 1),
}
ROWS = (1, 4, 8, 16, 32, 64, 512)
# Of those that are bound by their own arithmetic, no more rows than this.
_FEW = 64


def forms(weight: Tensor) -> Iterator[tuple[str, Linear, torch.dtype]]:
    stored = StoredTensor.dense("w", weight)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        yield name, linear_method("none", dtype).linear(stored, None), dtype
    for name in ("int8", "int4"):
        linear = linear_method(name, torch.bfloat16).linear(stored, None)
        assert isinstance(linear, ByRows)
        yield f"{name} few", linear.few, torch.bfloat16
        yield f"{name} many", linear.many, torch.bfloat16


def built(shape: str) -> tuple[dict[str, tuple[list[tuple[int, Linear]], torch.dtype]], int]:
    """Each form's linears with their columns, and the weights in one of them."""
    matrices, layers = SHAPES[shape]
    made: dict[str, tuple[list[tuple[int, Linear]], torch.dtype]] = {}
    for n, k in matrices * layers:
        for name, linear, dtype in forms(torch.randn(n, k)):
            made.setdefault(name, ([], dtype))[0].append((k, linear))
    return made, sum(n * k for n, k in matrices) * layers


def measure(shape: str, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """ns a weight by rows and form, the median of ``rounds``; a first round is left out."""
    made, weights = built(shape)
    result: dict[str, Any] = {}
    for rows in ROWS:
        times: dict[str, list[float]] = {name: [] for name in made if rows <= _FEW or not name.endswith("few")}
        for _ in range(rounds + 1):
            for name, found in times.items():
                linears, dtype = made[name]
                inputs = {k: torch.randn(rows, k).to(dtype) for k, _ in linears}
                began = clock()
                for k, linear in linears:
                    linear(inputs[k])
                found.append((clock() - began) * 1e9 / weights)
        result[str(rows)] = {name: round(statistics.median(found[1:]), 3) for name, found in times.items()}
        print(f"{shape}, {rows} rows: {result[str(rows)]}", file=sys.stderr)
    result["bytes_a_weight"] = {
        name: round(sum(linear.nbytes for _, linear in linears) / weights, 3)
        for name, (linears, _) in made.items()
        if not name.endswith("many")
    }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    with torch.inference_mode():
        figures = {shape: measure(shape, arguments.rounds, clock) for shape in arguments.shapes}
    result = {**report.header(device_name=report.cpu_name()), "threads": arguments.threads, "ns_a_weight": figures}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
