"""The executor with graphs as a device of its own: on the GPU where there is one, else its kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.devices.interface import DeviceFacts, DevicePolicy, WeightChoice
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.executor.graphs.load import load_executor
from firsttoken.executor.graphs.runtime import CUDARuntime, HostRuntime
from firsttoken.kernels.linear.config import LinearConfig, OpKind
from firsttoken.kernels.packed_linear.config import PackedConfig, default_config
from firsttoken.scheduler.budget import TokenCap
from firsttoken.scheduler.step_prior import Roof


def few_programs(kind: OpKind, n: int, k: int, rows: int, format: str) -> LinearConfig | PackedConfig:
    """Interpreting costs tens of milliseconds a program, so each takes as many columns as it can."""
    if format != "bfloat16":
        return replace(default_config(n, k, rows, format), row_warps=8)
    columns = min(256, 1 << (n - 1).bit_length())
    if rows == 1:
        return LinearConfig("fma", columns, 64, 8, 0)
    most = next(most for most in (8, 16, 32, 64) if rows <= most)
    return LinearConfig("dot", columns, 64, 8, 2, block_m=most, prefetch=True)  # type: ignore[arg-type]


def make_executor(config: ExecutorConfig, checkpoint: Checkpoint) -> GraphExecutor:
    """On the GPU as users have it."""
    if torch.cuda.is_available():
        return load_executor(config, checkpoint, CUDARuntime())
    return load_executor(config, checkpoint, HostRuntime(), few_programs)


class GraphDevice:
    """What a vendor would register: nothing of the engine knows it."""

    kind = "graphs"
    policy = DevicePolicy(
        kv_share=0.5,
        kv_limit=1 << 24,
        fixed_memory=0,
        budget=lambda time: TokenCap(alone=64, mixed=20),
        roof=Roof(10, 1),
        sizes=GRAPH_SIZES,
        in_flight=2,
    )

    def __init__(self) -> None:
        self.loaded: list[GraphExecutor] = []

    def refusal(self) -> str | None:
        return None

    def facts(self) -> DeviceFacts:
        return DeviceFacts(name="test device", free_memory=1 << 30, total_memory=1 << 30, threads=1)

    def choose_weights(self, quantization: str, dtype: str) -> WeightChoice:
        return WeightChoice(quantization="none", dtype="bfloat16", why="all it can")

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def load(
        self, config: ExecutorConfig, checkpoint: Checkpoint, close: Callable[[str], None] | None = None
    ) -> GraphExecutor:
        executor = make_executor(config, checkpoint)
        self.loaded.append(executor)
        return executor
