"""Times an operation so that only memory counts: inside a CUDA graph on a GPU, over data that no cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Operation = Callable[[], object]

MIN_ROUNDS = 3


def seconds_per_operation(candidates: Sequence[Sequence[Operation]], device: str, budget_s: float) -> list[float]:
    """Median seconds of one operation of each candidate, all measured in turns for about ``budget_s`` together, so that
    a device that drifts slows all alike.

    A candidate's operations are run one after the other and should read different data, more in all than caches hold.
    On CUDA they are captured in one graph, since a launch from the host takes longer than most of them.
    """
    runs = [_captured(operations) if device == "cuda" else _in_turn(operations) for operations in candidates]
    for run in runs:
        run()
    took: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + budget_s
    while len(took[-1]) < MIN_ROUNDS or time.perf_counter() < end:
        for times, run in zip(took, runs, strict=True):
            times.append(run())
    return [statistics.median(times) / len(operations) for times, operations in zip(took, candidates, strict=True)]


def _in_turn(operations: Sequence[Operation]) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        for operation in operations:
            operation()
        return time.perf_counter() - began

    return run


def _captured(operations: Sequence[Operation]) -> Callable[[], float]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for operation in operations:
            operation()  # what libraries set up at their first call cannot be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operation in operations:
            operation()
    began: Any
    ended: Any
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def run() -> float:
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    return run
