"""NVIDIA GPUs through CUDA: our Triton kernels in CUDA graphs, cuBLAS for many rows."""

from __future__ import annotations

import importlib.util
import os

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import ConfigError
from firsttoken.devices.cpu import one_of
from firsttoken.devices.interface import DeviceFacts, DevicePolicy, WeightChoice
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import Executor

GIB = 1 << 30
# bfloat16 matrix instructions and asynchronous copies begin with Ampere.
OLDEST_CAPABILITY = (8, 0)
QUANTIZATIONS = ("auto", "none")
DTYPES = ("auto", "bfloat16")

POLICY = DevicePolicy(
    # The rest is for graphs, cuBLAS and the allocator's rounding.
    kv_share=0.95,
    kv_limit=None,
    fixed_memory=2 * GIB,
    # A long prompt alone goes in one step: each further one costs a pass over the weights.
    prefill_tokens=8192,
    mixed_prefill_tokens=512,
    mixed_prefill_per_row=0,
    # The host plans and launches a step while the one before it runs.
    in_flight=2,
)


class CUDADevice:
    """The first visible CUDA device."""

    kind = "cuda"
    policy = POLICY

    def refusal(self) -> str | None:
        import torch

        if not torch.cuda.is_available():
            built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
            return f"{built}; use --device cpu, or install a CUDA build of torch on a machine with an NVIDIA GPU"
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name()
            return (
                f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer (Ampere); use --device cpu"
            )
        if importlib.util.find_spec("triton") is None:
            return "the kernels are written in Triton, which is not installed: pip install triton"
        return None

    def facts(self) -> DeviceFacts:
        import torch

        free, total = torch.cuda.mem_get_info()
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return DeviceFacts(
            name=torch.cuda.get_device_name(), free_memory=free, total_memory=total, threads=min(threads, 8)
        )

    def choose_weights(self, quantization: str, dtype: str) -> WeightChoice:
        one_of("quantization", quantization, ("auto", "none", "packed"))
        one_of("dtype", dtype, ("auto", "bfloat16", "float32"))
        if quantization == "packed":
            raise ConfigError("quantization 'packed' is for the CPU: leave it out or use --quantization none")
        if dtype == "float32":
            raise ConfigError("dtype 'float32' is for the CPU: the GPU's kernels compute in bfloat16")
        return WeightChoice(quantization="none", dtype="bfloat16", why="what the GPU's kernels compute in")

    def load(self, config: ExecutorConfig, checkpoint: Checkpoint) -> Executor:
        from firsttoken.executor.graphs.load import load_executor

        return load_executor(config, checkpoint)
