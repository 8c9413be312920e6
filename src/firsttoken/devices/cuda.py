"""NVIDIA GPUs through CUDA: our Triton kernels in CUDA graphs, cuBLAS for many rows."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import ConfigError
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.devices.cpu import one_of
from firsttoken.devices.early_context import EarlyContext
from firsttoken.devices.interface import DeviceFacts, DevicePolicy, WeightChoice
from firsttoken.executor.ahead.client import AheadCompiler, spare_processes
from firsttoken.executor.ahead.gpus import GPU
from firsttoken.executor.ahead.messages import Order
from firsttoken.executor.ahead.readiness import Readiness
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import Executor
from firsttoken.scheduler.budget import TimeBudget
from firsttoken.scheduler.step_prior import Roof

GIB = 1 << 30
# Dependent launches begin with Hopper, and the kernels' tiles are cut for its shared memory.
OLDEST_CAPABILITY = (9, 0)
# There where the kernel has NVIDIA's driver: asked before torch, which could tell more, is imported.
CONTROL_DEVICE = Path("/dev/nvidiactl")

POLICY = DevicePolicy(
    # The rest is for graphs, cuBLAS and the allocator's rounding.
    kv_share=0.95,
    kv_limit=None,
    fixed_memory=2 * GIB,
    budget=partial(
        TimeBudget,
        # An 8B on an H200 decodes one row in 3.8 ms and 64 in 6. Steps take up to 13 ms and 512 token rows beside the
        # one, up to 17 ms and 640 beside the others, unless a class is promised less or more: so 99 % of the gaps are
        # below 18 ms. A crowd that comes at once is served sooner, at the cost of its own gaps.
        stretch=3.3,
        added=2.35,
        crowded=9.0,
        # A lone prompt of 8,192 tokens is 4 % sooner in one step than in four. With others behind it, they are sooner;
        # with many, the median one is sooner again, as large steps compute more in a second.
        alone=((0, 8192), (2, 2048), (32, 8192)),
        sizes=GRAPH_SIZES,
    ),
    # An H200's; another GPU's are learned within some tens of steps.
    roof=Roof(read_gb_s=4300, tflops=700, key_ns=16),
    sizes=GRAPH_SIZES,
    # The host plans and launches a step while the one before it runs.
    in_flight=2,
    # Places in the executor's ring (`executor.graphs.executor.RING`).
    max_in_flight=8,
    deterministic=True,
    # One row of an 8B takes 3.8 ms in bfloat16, 2.3 and 1.8 with rounded weights; a chunk gains a sixth or a third.
    row_gain={"fp8": 1.65, "int4": 2.1},
    rounded=("int4", "fp8"),
)


class CUDADevice:
    """The first visible CUDA device."""

    kind = "cuda"
    policy = POLICY

    def __init__(self) -> None:
        self._compiler: AheadCompiler | None = None
        self._context: EarlyContext | None = None
        self._triton: threading.Thread | None = None

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
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer (Hopper); use --device cpu"
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
        if quantization == "int8":
            raise ConfigError("quantization 'int8' is for the CPU: the eight bits of a GPU are --quantization fp8")
        one_of("quantization", quantization, ("auto", "none", "packed", "int4", "fp8"))
        one_of("dtype", dtype, ("auto", "bfloat16", "float32"))
        if quantization == "packed":
            raise ConfigError("quantization 'packed' is for the CPU: leave it out or use --quantization none")
        if dtype == "float32":
            raise ConfigError("dtype 'float32' is for the CPU: the GPU's kernels compute in bfloat16")
        chosen = "none" if quantization == "auto" else quantization
        return WeightChoice(quantization=chosen, dtype="bfloat16", why="what the GPU's kernels compute in")

    def begin(self) -> None:
        if self._compiler is None and CONTROL_DEVICE.exists():
            self._compiler = AheadCompiler()
            self._context = EarlyContext()
            self._triton = threading.Thread(target=_read_triton, name="firsttoken-triton", daemon=True)
            self._triton.start()

    def end(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None
        if self._context is not None:
            self._context.close()
            self._context = None

    def load(
        self, config: ExecutorConfig, checkpoint: Checkpoint, close: Callable[[str], None] | None = None
    ) -> Executor:
        from firsttoken.executor.graphs.load import load_executor

        if close is not None:
            close("imports")
        kernels, first = self._order(config, checkpoint)
        prepared = threading.Thread(target=_prepare_triton, args=(self._triton,), name="firsttoken-target")
        prepared.start()
        try:
            executor = load_executor(config, checkpoint, kernels=kernels)
            if close is not None:
                close("weights")
            prepared.join()
            kernels.wait_first(first)
        except BaseException:
            kernels.close()
            raise
        if close is not None:
            close("compile")
        return executor

    def _order(self, config: ExecutorConfig, checkpoint: Checkpoint) -> tuple[Readiness, int]:
        """Have kernels compiled while weights are read, if they are not there from last time; and how many steps'
        kernels should be waited for."""
        from firsttoken.executor.ahead.marks import is_done
        from firsttoken.executor.ahead.plan import all_keys, first_keys
        from firsttoken.executor.graphs.load import shape_table

        order = Order(
            model=checkpoint.config, executor=config, gpu=present_gpu(), processes=spare_processes(), quietly=True
        )
        if is_done(order):
            self.end()
        if self._compiler is None:
            return Readiness(), 0
        self._compiler.order(order)
        # From here on the executor ends it.
        compiler, self._compiler = self._compiler, None
        table = shape_table(config)
        return Readiness(compiler, all_keys(table)), len(first_keys(table))


def present_gpu() -> GPU:
    """The first visible one; only without a `CUDADevice.refusal`."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return GPU(found.name, 10 * found.major + found.minor, found.multi_processor_count, found.total_memory)


def _read_triton() -> None:
    """Before its first kernel Triton reads all of itself, several hundred MB, and keeps what came of it. Who needs it
    hears what is wrong with it."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _prepare_triton(reading: threading.Thread | None) -> None:
    """The rest of what Triton does once a process, which takes a GPU that torch uses; ``reading`` is the first part, if
    it was begun."""
    if reading is not None:
        reading.join()
    _read_triton()
    with contextlib.suppress(Exception):
        from triton.runtime import driver

        driver.active.get_current_target()


class PlannedGPU(CUDADevice):
    """A GPU that need not be here, to find out what an engine on it would be like."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self.gpu = gpu

    def refusal(self) -> str | None:
        return None

    def facts(self) -> DeviceFacts:
        return DeviceFacts(name=self.gpu.name, free_memory=self.gpu.memory, total_memory=self.gpu.memory, threads=1)

    def begin(self) -> None:
        pass

    def load(
        self, config: ExecutorConfig, checkpoint: Checkpoint, close: Callable[[str], None] | None = None
    ) -> Executor:
        raise ConfigError(f"{self.gpu.name} is only planned for: load onto a device that is here")
