"""The CPU: torch's own operations, one compute thread with a team of its own."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import ConfigError
from firsttoken.core.step_sizes import StepSizes
from firsttoken.devices.interface import DeviceFacts, DevicePolicy, WeightChoice
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import Executor
from firsttoken.scheduler.budget import TimeBudget
from firsttoken.scheduler.step_prior import Roof

GIB = 1 << 30
QUANTIZATIONS = ("auto", "none", "packed", "int8", "int4")
DTYPES = ("auto", "bfloat16", "float32")
# Products that torch's libraries keep prepared: each number of token rows is a new one for each kind of weights. By
# themselves they keep 1,024, which after prompts of 500 lengths were 1.1 GiB, whatever the model's size.
PREPARED = 128
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

POLICY = DevicePolicy(
    # A share of what is free, since other programs want memory too.
    kv_share=0.25,
    kv_limit=4 * GIB,
    fixed_memory=0,
    budget=partial(
        TimeBudget,
        # The default model decodes a row in 12 ms on two cores: chunks of some 48 tokens beside it, fewer after some
        # thousand tokens of context. Larger ones are faster per token, and every gap feels them.
        stretch=5.0,
        added=8.0,
        crowded=5.0,
        # Alone, 512 rows are 5 % faster per token than 256 and as fast as more; whoever arrives meanwhile waits for one
        # chunk.
        alone=((0, 512),),
        sizes=StepSizes(),
        least=16,
    ),
    # Two cores of a server; what others have is learned within some tens of steps.
    roof=Roof(read_gb_s=15, tflops=0.7),
    sizes=StepSizes(),
    # The host's planning is small beside a step, and a request that arrives during a step joins the next one only if
    # that is not planned yet: depth 1 gives the earlier first token.
    in_flight=1,
)


@dataclass(frozen=True)
class CPUFacts:
    """What is to be known of the CPU: ``fast_bf16`` when it has instructions for bfloat16 products, memory in bytes."""

    threads: int
    fast_bf16: bool
    free_memory: int

    @classmethod
    def detect(cls) -> CPUFacts:
        import torch

        return cls(
            threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            fast_bf16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
            free_memory=_free_memory(),
        )


class CPUDevice:
    """``facts`` are detected when not given."""

    kind = "cpu"
    policy = POLICY

    def __init__(self, facts: CPUFacts | None = None) -> None:
        self._facts = facts

    def refusal(self) -> str | None:
        return None

    def facts(self) -> DeviceFacts:
        found = self._detected()
        return DeviceFacts(
            name=platform.processor() or platform.machine(),
            free_memory=found.free_memory,
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            threads=found.threads,
        )

    def choose_weights(self, quantization: str, dtype: str) -> WeightChoice:
        if quantization == "fp8":
            raise ConfigError("quantization 'fp8' is for GPUs: the eight bits of the CPU are --quantization int8")
        one_of("quantization", quantization, QUANTIZATIONS)
        one_of("dtype", dtype, DTYPES)
        fast = self._detected().fast_bf16
        why = "as asked for"
        if quantization == "auto":
            quantization = "packed" if fast and dtype != "float32" else "none"
            if quantization == "packed":
                why = "weights packed for the CPU's matrix instructions"
            else:
                why = "float32 was asked for" if dtype == "float32" else "this CPU has no bfloat16 instructions"
        if quantization != "none":
            if not fast:
                raise ConfigError(
                    f"quantization {quantization!r} computes in bfloat16, which this CPU has no instructions for "
                    "(AVX-512 needed): use --quantization none"
                )
            if dtype == "float32":
                raise ConfigError(
                    f"quantization {quantization!r} computes in bfloat16: use --quantization none for float32"
                )
        if dtype == "auto":
            dtype = "float32" if quantization == "none" else "bfloat16"
        return WeightChoice(quantization=quantization, dtype=dtype, why=why)

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def load(
        self, config: ExecutorConfig, checkpoint: Checkpoint, close: Callable[[str], None] | None = None
    ) -> Executor:
        from firsttoken.executor.torch_executor import TorchExecutor

        for name in _CAPACITIES:  # the libraries read them at their first product
            os.environ.setdefault(name, str(PREPARED))
        if close is not None:
            close("imports")
        return TorchExecutor.load(config, checkpoint)

    def _detected(self) -> CPUFacts:
        if self._facts is None:
            self._facts = CPUFacts.detect()
        return self._facts


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless ``value`` is among ``known``."""
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
