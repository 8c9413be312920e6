"""One place where "auto" becomes a value: every choice is returned with its reason, and logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.checkpoint.quantized.scheme import FORMATS, is_linear
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import ROUNDED, KVFormat
from firsttoken.core.step_sizes import next_size
from firsttoken.devices.cpu import one_of
from firsttoken.devices.interface import Device, DevicePolicy, WeightChoice
from firsttoken.devices.registry import choose_device
from firsttoken.engine.affinity import check_core
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.host_clock import HostClock
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.memory_plan.weights import FUSED, plan_weights
from firsttoken.kvcache.disk import DiskConfig
from firsttoken.kvcache.eviction import make_policy
from firsttoken.kvcache.host import available_memory, host_blocks
from firsttoken.scheduler.budget import Budget, TimeBudget
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_prior import ModelCost, rough_step_time
from firsttoken.scheduler.step_time import StepTime
from firsttoken.scheduler.window import BatchWindow, find_window

MIB = 1 << 20
GIB = 1 << 30
# Far above what is of use, low enough that what is kept for each stays small.
# Of K and V in eight or four bits the kernels read these (`kernels.paged_attention.pages`).
_ROUNDED_HEADS = (64, 128, 256)
_MAX_NUM_SEQS = 4096
_BYTES = {"bfloat16": 2, "float32": 4}
_KV_DISK_SIZE = 32 * GIB


@dataclass(frozen=True)
class Choice:
    """What an option that was left to the engine has become, in words, and why."""

    option: str
    value: str
    why: str


@dataclass(frozen=True)
class _Log:
    """Says each choice as it is made."""

    say: Callable[[str], None]
    made: Callable[[Choice], object]

    def chose(self, option: str, value: object, why: str) -> None:
        self.say(f"{option} = {value} ({why})")
        self.made(Choice(option, str(value), why))


def resolve(
    args: EngineArgs,
    checkpoint: Checkpoint,
    devices: Sequence[Device],
    say: Callable[[str], None] = lambda text: None,
    made: Callable[[Choice], object] = lambda choice: None,
) -> tuple[Device, EngineConfig]:
    """The device to run on (of ``devices``, the preferred first) and explicit values for everything in ``args``. Each
    choice is told to ``say`` in words, and to ``made``.

    Raises `ConfigError` for what cannot be honoured.
    """
    log = _Log(say, made)
    config = checkpoint.config
    device, why = choose_device(args.device, devices)
    if args.device == "auto":
        log.chose("device", device.kind, why)
    if args.engine_core is not None:
        check_core(args.engine_core)
    policy, facts = device.policy, device.facts()
    if args.deterministic and not policy.deterministic:
        raise ConfigError(
            f"deterministic is not offered on device {device.kind!r}: leave it out (on the CPU, --quantization none "
            "--dtype float32 gives equal tokens in any batch, though not equal bits)"
        )
    weights = _choose_weights(args, checkpoint, device, log)
    for option in ("quantization", "dtype"):
        if getattr(args, option) == "auto":
            log.chose(option, getattr(weights, option), weights.why)
    kv_format = _kv_format(args, config, device.kind, weights.dtype, log)
    free = facts.free_memory - policy.fixed_memory
    weight_bytes = _weight_bytes(checkpoint, weights, device.kind, free)
    left = free - weight_bytes
    step_time = LearningStepTime(rough_step_time(policy.roof, _cost(checkpoint, weight_bytes, kv_format), policy.sizes))
    budget = _budget(args, policy, step_time, weights.quantization)
    max_num_seqs = _positive("max_num_seqs", args.max_num_seqs, _MAX_NUM_SEQS)
    host = HostClock()
    window = _window(args, max_num_seqs, step_time, host)
    max_model_len, kv_blocks = _lengths(args, config, kv_format, max_num_seqs, policy, (free, left), log)
    # More threads than processors only wait for each other, and OpenMP ends the process when it gets none.
    threads = _positive("threads", _given(args.threads, facts.threads), max(16, 2 * facts.threads))
    # With equal bits in any batch decode rows are computed as chunks, beside those of prompts.
    step_tokens = budget.most + max_num_seqs if args.deterministic else max(budget.most, max_num_seqs)
    # No step has more than all slots hold: what it is padded to beyond that would be prepared for nobody.
    step_tokens = min(step_tokens, next_size(policy.sizes.chunks, max_num_seqs * max_model_len))
    return device, EngineConfig(
        model=args.served_model_name or checkpoint.name,
        executor=ExecutorConfig(
            device=device.kind,
            dtype=weights.dtype,
            quantization=weights.quantization,
            kv_format=kv_format,
            kv_blocks=kv_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_step_tokens=step_tokens,
            threads=threads,
            adaptive_threads=args.threads is None,
            deterministic=args.deterministic,
        ),
        prefix_caching=args.prefix_caching,
        budget=budget,
        step_time=step_time,
        in_flight=_positive("in_flight", _given(args.in_flight, policy.in_flight), policy.max_in_flight),
        window=window,
        host=host,
        host_blocks=_host_blocks(args, kv_format),
        disk=_disk(args),
        eviction=args.kv_eviction,
    )


def _choose_weights(args: EngineArgs, checkpoint: Checkpoint, device: Device, log: _Log) -> WeightChoice:
    """Weights that a file has rounded stay as they are where the device can compute so; they are never rounded again.
    "none" computes with them in full anywhere."""
    scheme = checkpoint.config.quantized
    if scheme is None:
        return device.choose_weights(args.quantization, args.dtype)
    matrices = [name for name, info in checkpoint.tensors.infos().items() if len(info.shape) == 2]
    stored, linears = scheme.main_format(matrices), sum(is_linear(name.removesuffix(".weight")) for name in matrices)
    if args.quantization in FORMATS and args.quantization != stored:
        raise ConfigError(
            f"quantization {args.quantization!r}: the weights of {checkpoint.name} are stored as {stored} ({scheme}) "
            "and are not rounded again; leave it out, or use --quantization none"
        )
    rounded = sum(scheme.of(name) is not None for name in matrices)
    log.say(f"{rounded} of {linears} linears are stored by {scheme}")
    kept = stored is not None and stored in device.policy.rounded
    if args.quantization == "auto" and kept and (device.kind == "cpu" or checkpoint.config.architecture in FUSED):
        assert stored is not None
        chosen = device.choose_weights(stored, args.dtype)
        return replace(chosen, why="what computes with the weights as they are stored")
    return device.choose_weights(args.quantization, args.dtype)


def _host_blocks(args: EngineArgs, kv_format: KVFormat) -> int:
    args.check_tiers()
    make_policy(args.kv_eviction)  # raises for one that is not known
    return host_blocks(args.kv_host_memory, kv_format, available_memory())


def _disk(args: EngineArgs) -> DiskConfig | None:
    if args.kv_disk is None:
        return None
    return DiskConfig(folder=Path(args.kv_disk), cap_bytes=_given(args.kv_disk_size, _KV_DISK_SIZE))


def _budget(args: EngineArgs, policy: DevicePolicy, step_time: StepTime, quantization: str) -> Budget:
    for option in ("prefill_tokens", "mixed_prefill_tokens"):
        if getattr(args, option) is not None:
            _positive(option, getattr(args, option))
    budget = policy.budget(step_time)
    if isinstance(budget, TimeBudget) and quantization in policy.row_gain:
        budget = budget.stretched(policy.row_gain[quantization])
    return budget.limited(args.prefill_tokens, args.mixed_prefill_tokens)


def _window(args: EngineArgs, max_num_seqs: int, step_time: StepTime, host: HostClock) -> BatchWindow | None:
    """It hears of the loop's own work: a process that computes on the CPU, or looks for the GPU's results again and
    again, is busy whenever there is a step."""
    try:
        return find_window(
            args.batch_window, args.targets, queue_limit=max_num_seqs, step_time=step_time, cpu_share=host.share
        )
    except ConfigError as error:
        raise ConfigError(f"batch_window: {error}") from None


def _cost(checkpoint: Checkpoint, weight_bytes: int, kv_format: KVFormat) -> ModelCost:
    """An embedding table that is not also the head is not read by a step, but for a row a token."""
    config, infos = checkpoint.config, checkpoint.tensors.infos()
    elements = sum(info.num_elements for info in infos.values())
    read = elements - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    return ModelCost(
        weight_bytes=weight_bytes * read / elements,
        parameters=elements - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2),
        kv_bytes=kv_format.bytes_per_block / kv_format.block_tokens,
        layers=config.num_layers,
        attention_width=config.num_heads * config.head_dim,
    )


def _weight_bytes(checkpoint: Checkpoint, weights: WeightChoice, device: str, free: int) -> int:
    """Weights that cannot fit are refused before the system runs out of memory and ends some process for it."""
    kept_as = weights.dtype
    if weights.quantization in FORMATS:
        kept_as = weights.quantization
        need = plan_weights(checkpoint, device, weights.dtype, weights.quantization).kept
    else:
        need = sum(info.num_elements for info in checkpoint.tensors.infos().values()) * _BYTES[weights.dtype]
    if need > free:
        raise ConfigError(
            f"the weights of {checkpoint.name} take {need / GIB:.1f} GiB in {kept_as}, but only "
            f"{free / GIB:.1f} GiB of memory are free: choose a smaller model"
        )
    return need


def _kv_format(args: EngineArgs, config: ModelConfig, device: str, dtype: str, log: _Log) -> KVFormat:
    wanted = args.kv_dtype
    one_of("kv_dtype", wanted, ("auto", *_BYTES, *ROUNDED))
    if wanted == "auto":
        wanted = dtype
        log.chose("kv_dtype", dtype, "as the activations")
    elif wanted in ROUNDED and device == "cuda" and config.head_dim not in _ROUNDED_HEADS:
        raise ConfigError(
            f"kv_dtype {wanted!r} on a GPU needs heads of {', '.join(map(str, _ROUNDED_HEADS))} elements, got "
            f"{config.head_dim}: leave kv_dtype at 'auto'"
        )
    elif wanted not in (dtype, *ROUNDED):
        raise ConfigError(
            f"kv_dtype {wanted!r} with dtype {dtype!r} is not supported: leave kv_dtype at 'auto', or choose one of "
            f"{', '.join(ROUNDED)}"
        )
    try:
        return KVFormat(dtype=wanted, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    except ValueError as error:
        raise ConfigError(f"kv_dtype: {error}") from None


def _lengths(
    args: EngineArgs,
    config: ModelConfig,
    kv_format: KVFormat,
    max_num_seqs: int,
    policy: DevicePolicy,
    memory_bytes: tuple[int, int],
    log: _Log,
) -> tuple[int, int]:
    """(max_model_len in tokens, KV blocks). ``memory_bytes`` are those free now, and those that the weights leave."""
    free, left = memory_bytes
    wanted = args.max_model_len if args.max_model_len is not None else config.max_position
    if not 1 <= wanted <= config.max_position:
        raise ConfigError(
            f"max_model_len must be 1 to {config.max_position} (the model's own limit), got {args.max_model_len}"
        )
    memory = args.kv_memory
    if memory is None:
        # One block more than the longest requests fill: the scheduler keeps a free one for running rows.
        longest = kv_format.blocks_for(wanted)
        memory = int(left * policy.kv_share)
        if policy.kv_limit is not None:
            most = (max_num_seqs * longest + 1) * kv_format.bytes_per_block
            memory = min(memory, most, max(policy.kv_limit, (longest + 1) * kv_format.bytes_per_block))
        log.chose("kv_memory", _mib(memory), f"{policy.kv_share:.0%} of what the weights leave")
    elif memory > free:
        raise ConfigError(f"kv_memory of {_mib(memory)} is more than the {_mib(free)} that are free")
    blocks = memory // kv_format.bytes_per_block
    fits = (blocks - 1) * kv_format.block_tokens
    if fits < 1:
        raise ConfigError(
            f"kv_memory of {_mib(memory)} holds no {kv_format.block_tokens}-token block "
            f"({_mib(kv_format.bytes_per_block)} each): give at least two blocks"
        )
    if fits < wanted:
        if args.max_model_len is not None:
            need = (kv_format.blocks_for(wanted) + 1) * kv_format.bytes_per_block
            raise ConfigError(
                f"max_model_len {wanted} needs {_mib(need)} of KV cache, but kv_memory is {_mib(memory)}: "
                f"raise kv_memory, or lower max_model_len to {fits}"
            )
        log.chose("max_model_len", fits, f"all that {_mib(memory)} of KV cache hold")
        wanted = fits
    elif args.max_model_len is None:
        log.chose("max_model_len", wanted, "the model's own limit")
    return wanted, blocks


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _positive(option: str, value: int, most: int | None = None) -> int:
    if value < 1:
        raise ConfigError(f"{option} must be at least 1, got {value}")
    if most is not None and value > most:
        raise ConfigError(f"{option} may be at most {most} here, got {value}")
    return value


def _mib(size: int) -> str:
    """So that two sizes that differ look different, those of tiny models too."""
    return f"{size / MIB:.2f}".rstrip("0").rstrip(".") + " MiB"
