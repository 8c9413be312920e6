"""What trials of kernels share: weights in turns, compiling side by side, and a table of what was timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gpu.attention import graph_us

# (n, k) of a layer's products: more than one shape, so that no rule is made of one alone.
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "8b": {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70b": {"qkv": (10240, 8192), "output": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
# More than an H200's second-level cache.
BYTES_IN_TURNS = 200 << 20


def copies(nbytes: int) -> int:
    """Weights of ``nbytes`` that are read in turns, so that each comes from memory."""
    return BYTES_IN_TURNS // nbytes + 1


def compile_ahead(compile_one: Callable[[Any], str | None], jobs: Sequence[Any], processes: int) -> list[str]:
    """``compile_one`` of each job in a process that never touches the GPU; what could not be compiled."""
    began = time.monotonic()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        failed = [word for word in pool.map(compile_one, jobs) if word is not None]
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.0f} s", *failed, sep="\n  ", flush=True)
    return failed


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
