"""What an engine will take of a machine's memory, said before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.devices.cpu import PREPARED, CPUDevice, CPUFacts
from firsttoken.devices.cuda import OLDEST_CAPABILITY, PlannedGPU
from firsttoken.devices.interface import Device
from firsttoken.engine.resolve import resolve
from firsttoken.executor.ahead.gpus import GPU
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.memory_plan.cpu import Footprint, plan_cpu_work
from firsttoken.executor.memory_plan.gpu import plan_gpu_work
from firsttoken.executor.memory_plan.weights import plan_weights
from firsttoken.kvcache.shard_size import recommend_shard_tokens

# What CUDA's context and the kernels' own code take of a GPU, beside all that torch's allocator knows of: 781
# to 835 MiB on an H200 (`benchmarks/gpu/plan.py`).
CONTEXT_BYTES = 810 << 20
# So much memory that nothing is refused for its size: whether it fits is what is asked here.
_ENDLESS = 1 << 50
# The most requests that an engine may compute at once.
MOST_USERS = 4096
# What a GPU's engine can round, weights and KV, by what it costs in answers: the least first.
_ROUNDINGS = (
    ("auto", "int8"),
    ("fp8", "auto"),
    ("fp8", "int8"),
    ("int4", "auto"),
    ("int4", "int8"),
    ("int4", "int4"),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the engine's peak. ``runtime``: the process or the GPU's context; ``weights`` as they are kept; ``kv``
    of all users at their full length; ``graphs``: captured steps, on the CPU prepared products; ``activations``: rows,
    work space and the largest step. ``loading`` is the peak before the first step, all included. ``kv_blocks`` is
    ``kv`` in blocks; ``kv_token`` what a token takes."""

    runtime: int
    weights: int
    kv: int
    graphs: int
    activations: int
    loading: int
    kv_blocks: int
    kv_token: int

    @property
    def total(self) -> int:
        return max(self.loading, self.runtime + self.weights + self.kv + self.graphs + self.activations)


@dataclass(frozen=True)
class Fit:
    """Of a plan on a machine of ``capacity`` bytes. ``max_users`` at the same context, 0 when there is no room for one;
    ``max_context`` in tokens for the same users, likewise; ``shard_tokens`` as recommended for requests of that
    length. ``refusal`` says why no engine would run there, whatever its memory; None where one would."""

    plan: MemoryPlan
    capacity: int
    max_users: int
    max_context: int
    shard_tokens: int
    refusal: str | None = None

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.plan.total <= self.capacity


@dataclass(frozen=True)
class CPUMachine:
    """This machine, and what an engine without a model takes of it."""

    facts: CPUFacts
    footprint: Footprint
    name = kind = "cpu"
    refusal = None

    @property
    def capacity(self) -> int:
        return self.facts.free_memory

    def plan(self, args: EngineArgs, checkpoint: Checkpoint, context: int, users: int) -> MemoryPlan:
        facts = CPUFacts(self.facts.threads, self.facts.fast_bf16, _ENDLESS)
        executor = _executor(args, checkpoint, CPUDevice(facts), context, users)
        weights = plan_weights(checkpoint, "cpu", executor.dtype, executor.quantization)
        work = plan_cpu_work(executor, checkpoint.config, weights, self.footprint, PREPARED)
        return MemoryPlan(
            runtime=self.footprint.engine + weights.mapped,
            weights=weights.kept,
            kv=executor.kv_blocks * executor.kv_format.bytes_per_block,
            graphs=work.prepared,
            activations=max(work.gaps, work.step) + work.attention,
            loading=work.loading,
            kv_blocks=executor.kv_blocks,
            kv_token=executor.kv_format.bytes_per_token,
        )


@dataclass(frozen=True)
class GPUMachine:
    """A GPU that need not be here."""

    gpu: GPU
    kind = "cuda"

    @property
    def name(self) -> str:
        return self.gpu.name

    @property
    def capacity(self) -> int:
        return self.gpu.memory

    @property
    def refusal(self) -> str | None:
        oldest, its = 10 * OLDEST_CAPABILITY[0] + OLDEST_CAPABILITY[1], self.gpu.capability
        if its >= oldest:
            return None
        return (
            f"no engine runs on {self.name}: it has compute capability {its / 10}, the kernels need {oldest / 10} or "
            "newer (Hopper)"
        )

    def plan(self, args: EngineArgs, checkpoint: Checkpoint, context: int, users: int) -> MemoryPlan:
        endless = msgspec.structs.replace(self.gpu, memory=_ENDLESS)
        executor = _executor(args, checkpoint, PlannedGPU(endless), context, users)
        weights = plan_weights(checkpoint, executor.device, executor.dtype, executor.quantization)
        prompts = min(executor.max_step_tokens, executor.max_num_seqs * executor.max_model_len)
        work = plan_gpu_work(executor, checkpoint.config, weights, self.gpu.name, self.gpu.sms, prompts)
        return MemoryPlan(
            runtime=CONTEXT_BYTES,
            weights=weights.kept,
            kv=executor.kv_blocks * executor.kv_format.bytes_per_block,
            graphs=work.graphs,
            activations=work.rows + work.steps,
            loading=0,
            kv_blocks=executor.kv_blocks,
            kv_token=executor.kv_format.bytes_per_token,
        )


Machine = CPUMachine | GPUMachine


def plan_memory(args: EngineArgs, checkpoint: Checkpoint, machine: Machine, context: int, users: int) -> Fit:
    """The plan of ``users`` requests at once of ``context`` tokens each, prompt and answer, and how it fits.

    ``args`` say how weights and KV are kept. Raises `ConfigError` for what an engine there would refuse, whatever its
    memory.
    """
    plan = partial(machine.plan, args, checkpoint)
    room = machine.capacity
    return Fit(
        plan=plan(context, users),
        capacity=room,
        max_users=_most(lambda count: plan(context, count).total <= room, MOST_USERS),
        max_context=_most(lambda length: plan(length, users).total <= room, checkpoint.config.max_position),
        shard_tokens=recommend_shard_tokens(context),
        refusal=machine.refusal,
    )


def rounded_to_fit(
    args: EngineArgs, checkpoint: Checkpoint, machine: GPUMachine, context: int, users: int
) -> EngineArgs | None:
    """``args`` with weights or KV rounded as little as makes the plan fit; None where no rounding does. What ``args``
    say of either stays as it is, and what an engine would refuse for this model is passed over."""
    for quantization, kv_dtype in _ROUNDINGS:
        changed = {
            name: value
            for name, value in (("quantization", quantization), ("kv_dtype", kv_dtype))
            if value != "auto" and getattr(args, name) == "auto"
        }
        if not changed:
            continue
        rounded = msgspec.structs.replace(args, **changed)
        try:
            plan = machine.plan(rounded, checkpoint, context, users)
        except ConfigError:
            continue
        if plan.total <= machine.capacity:
            return rounded
    return None


def _executor(args: EngineArgs, checkpoint: Checkpoint, device: Device, context: int, users: int) -> ExecutorConfig:
    """As the engine would have it, with KV for so many requests of that length and no more."""
    sized = msgspec.structs.replace(args, max_model_len=context, max_num_seqs=users, kv_memory=_ENDLESS // 2)
    executor = resolve(sized, checkpoint, [device])[1].executor
    # One block more than the requests fill: the scheduler keeps a free one for running rows.
    return replace(executor, kv_blocks=users * executor.kv_format.blocks_for(context) + 1)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to ``most`` that fits, where more never fits better."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
