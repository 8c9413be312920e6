"""One place where "auto" becomes a value: every choice is returned with its reason, and logged."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import KVFormat
from firsttoken.engine.config import EngineConfig
from firsttoken.executor.config import ExecutorConfig

MIB = 1 << 20
GIB = 1 << 30
_DTYPES = ("auto", "bfloat16", "float32")
_QUANTIZATIONS = ("auto", "none", "packed")
_DEVICES = ("auto", "cpu", "cuda")
# A share of what is free, since weights, activations and other programs want memory too.
_KV_SHARE = 0.25
_KV_CPU_LIMIT = 4 * GIB
# Far above what is of use, low enough that what is kept for each stays small.
_MAX_NUM_SEQS = 4096
_MAX_IN_FLIGHT = 64
# Beside decode rows a chunk of this size keeps a step near five times a plain decode step (57 against 12 ms for the
# default model on two cores, up to 1k tokens of context); larger chunks are faster per token, and every gap feels them.
MIXED_PREFILL_TOKENS = 48
# A plain step takes 24 ms with 8 decode rows and 45 with 32: this many more for each row keep to five times too.
MIXED_PREFILL_PER_ROW = 6
# Alone, 512 rows are 5 % faster per token than 256 and as fast as more; whoever arrives meanwhile waits for one chunk.
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Machine:
    """What the resolver may know of the machine it runs on."""

    cuda: bool
    cpu_threads: int
    fast_bf16: bool
    free_memory: int

    @classmethod
    def detect(cls) -> Machine:
        import torch

        return cls(
            cuda=torch.cuda.is_available(),
            cpu_threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            fast_bf16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
            free_memory=_free_memory(),
        )


@dataclass(frozen=True)
class _Log:
    """Says each choice as it is made."""

    say: Callable[[str], None]

    def chose(self, option: str, value: object, why: str) -> None:
        self.say(f"{option} = {value} ({why})")


def resolve(
    args: EngineArgs, checkpoint: Checkpoint, machine: Machine, say: Callable[[str], None] = lambda text: None
) -> EngineConfig:
    """Explicit values for everything in ``args``; raises `ConfigError` for what cannot be honoured."""
    log = _Log(say)
    config = checkpoint.config
    device = _device(args, machine, log)
    quantization, dtype = _weights(args, machine, log)
    kv_format = KVFormat(
        dtype=_kv_dtype(args, dtype, log),
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    _check_weights(checkpoint, dtype, machine)
    max_num_seqs = _positive("max_num_seqs", args.max_num_seqs, _MAX_NUM_SEQS)
    max_model_len, kv_blocks = _lengths(args, config, kv_format, max_num_seqs, machine, log)
    # More threads than processors only wait for each other, and OpenMP ends the process when it gets none.
    threads = _positive("threads", _given(args.threads, machine.cpu_threads), max(16, 2 * machine.cpu_threads))
    # On the CPU the host's planning is small beside a step, and a request that arrives during a step joins the next
    # one only if that is not planned yet: depth 1 gives the earlier first token.
    return EngineConfig(
        model=args.served_model_name or checkpoint.name,
        executor=ExecutorConfig(
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_format=kv_format,
            kv_blocks=kv_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            threads=threads,
            adaptive_threads=args.threads is None,
        ),
        prefix_caching=args.prefix_caching,
        prefill_tokens=_positive("prefill_tokens", _given(args.prefill_tokens, PREFILL_TOKENS)),
        mixed_prefill_tokens=_positive("mixed_prefill_tokens", _given(args.mixed_prefill_tokens, MIXED_PREFILL_TOKENS)),
        # A cap that was asked for is kept as it is.
        mixed_prefill_per_row=MIXED_PREFILL_PER_ROW if args.mixed_prefill_tokens is None else 0,
        in_flight=_positive("in_flight", _given(args.in_flight, 1), _MAX_IN_FLIGHT),
    )


def _device(args: EngineArgs, machine: Machine, log: _Log) -> str:
    _one_of("device", args.device, _DEVICES)
    if args.device == "cuda":
        found = "torch finds a CUDA device" if machine.cuda else "torch finds no CUDA device here either"
        raise ConfigError(f"device 'cuda' is not supported by this version ({found}): use --device cpu")
    if args.device == "auto":
        log.chose("device", "cpu", "the only device that this version computes on")
    return "cpu"


def _weights(args: EngineArgs, machine: Machine, log: _Log) -> tuple[str, str]:
    """(quantization, dtype)."""
    _one_of("quantization", args.quantization, _QUANTIZATIONS)
    _one_of("dtype", args.dtype, _DTYPES)
    quantization = args.quantization
    if quantization == "auto":
        packable = machine.fast_bf16 and args.dtype != "float32"
        quantization = "packed" if packable else "none"
        log.chose(
            "quantization",
            quantization,
            "weights packed for the CPU's matrix instructions" if packable else _why_unpacked(args),
        )
    if quantization == "packed":
        if not machine.fast_bf16:
            raise ConfigError(
                "quantization 'packed' computes in bfloat16, which this CPU has no instructions for (AVX-512 needed): "
                "use --quantization none"
            )
        if args.dtype == "float32":
            raise ConfigError("quantization 'packed' computes in bfloat16: use --quantization none for float32")
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if quantization == "packed" else "float32"
        log.chose("dtype", dtype, f"what quantization {quantization!r} computes in on the CPU")
    return quantization, dtype


def _check_weights(checkpoint: Checkpoint, dtype: str, machine: Machine) -> None:
    """Weights that cannot fit are refused before the system runs out of memory and ends some process for it."""
    need = sum(info.num_elements for info in checkpoint.tensors.infos().values()) * (2 if dtype == "bfloat16" else 4)
    if need > machine.free_memory:
        raise ConfigError(
            f"the weights of {checkpoint.name} take {need / GIB:.1f} GiB in {dtype}, but only "
            f"{machine.free_memory / GIB:.1f} GiB of memory are free: choose a smaller model"
        )


def _why_unpacked(args: EngineArgs) -> str:
    return "float32 was asked for" if args.dtype == "float32" else "this CPU has no bfloat16 instructions"


def _kv_dtype(args: EngineArgs, dtype: str, log: _Log) -> str:
    _one_of("kv_dtype", args.kv_dtype, _DTYPES)
    if args.kv_dtype == "auto":
        log.chose("kv_dtype", dtype, "as the activations")
        return dtype
    if args.kv_dtype != dtype:
        raise ConfigError(f"kv_dtype {args.kv_dtype!r} with dtype {dtype!r} is not supported: leave kv_dtype at 'auto'")
    return args.kv_dtype


def _lengths(
    args: EngineArgs, config: ModelConfig, kv_format: KVFormat, max_num_seqs: int, machine: Machine, log: _Log
) -> tuple[int, int]:
    """(max_model_len in tokens, KV blocks)."""
    wanted = args.max_model_len if args.max_model_len is not None else config.max_position
    if not 1 <= wanted <= config.max_position:
        raise ConfigError(
            f"max_model_len must be 1 to {config.max_position} (the model's own limit), got {args.max_model_len}"
        )
    memory = args.kv_memory
    if memory is None:
        # One block more than the longest requests fill: the scheduler keeps a free one for running rows.
        longest = kv_format.blocks_for(wanted)
        most = (max_num_seqs * longest + 1) * kv_format.bytes_per_block
        memory = min(int(machine.free_memory * _KV_SHARE), most)
        memory = min(memory, max(_KV_CPU_LIMIT, (longest + 1) * kv_format.bytes_per_block))
        log.chose("kv_memory", f"{memory / MIB:.0f} MiB", f"{_KV_SHARE:.0%} of free memory, at most what can be used")
    elif memory > machine.free_memory:
        raise ConfigError(
            f"kv_memory of {memory / MIB:.0f} MiB is more than the {machine.free_memory / MIB:.0f} MiB that are free"
        )
    blocks = memory // kv_format.bytes_per_block
    fits = (blocks - 1) * kv_format.block_tokens
    if fits < 1:
        raise ConfigError(
            f"kv_memory of {memory / MIB:.1f} MiB holds no {kv_format.block_tokens}-token block "
            f"({kv_format.bytes_per_block / MIB:.2f} MiB each): give at least two blocks"
        )
    if fits < wanted:
        if args.max_model_len is not None:
            need = (kv_format.blocks_for(wanted) + 1) * kv_format.bytes_per_block
            raise ConfigError(
                f"max_model_len {wanted} needs {need / MIB:.0f} MiB of KV cache, but kv_memory is "
                f"{memory / MIB:.0f} MiB: raise kv_memory, or lower max_model_len to {fits}"
            )
        log.chose("max_model_len", fits, f"all that {memory / MIB:.0f} MiB of KV cache hold")
        wanted = fits
    elif args.max_model_len is None:
        log.chose("max_model_len", wanted, "the model's own limit")
    return wanted, blocks


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _positive(option: str, value: int, most: int | None = None) -> int:
    if value < 1:
        raise ConfigError(f"{option} must be at least 1, got {value}")
    if most is not None and value > most:
        raise ConfigError(f"{option} may be at most {most} here, got {value}")
    return value


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
