"""From a configuration and a checkpoint to an executor on a GPU."""

from __future__ import annotations

import torch

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import ConfigError
from firsttoken.executor.ahead.readiness import Readiness
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.executor.graphs.profiles import ShapeTable
from firsttoken.executor.graphs.runtime import CUDARuntime, Runtime
from firsttoken.executor.memory_plan.weights import ROUNDED_BITS
from firsttoken.kernels.linear.config import OpKind
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.kernels.paged_attention.gpu_config import prefill_config
from firsttoken.kernels.tuning import product_config
from firsttoken.models.fused import AnyConfig, ChooseLinear
from firsttoken.models.load_fused import Limits
from firsttoken.models.load_step import load_step_model

GIB = 1 << 30


def load_executor(
    config: ExecutorConfig,
    checkpoint: Checkpoint,
    runtime: Runtime | None = None,
    choose_linear: ChooseLinear | None = None,
    kernels: Readiness | None = None,
) -> GraphExecutor:
    """Load the weights and make the KV pool. ``choose_linear`` replaces the device's stored configs, ``kernels`` tells
    which are compiled already.

    Raises `CheckpointError` for tensors that do not fit, `ConfigError` with what was wanted when memory does not
    suffice.
    """
    runtime = runtime or CUDARuntime()
    try:
        return _load(config, checkpoint, runtime, choose_linear, kernels)
    except torch.OutOfMemoryError as error:
        raise ConfigError(_plan(config, runtime)) from error


def shape_table(config: ExecutorConfig) -> ShapeTable:
    """The shapes of an executor of this configuration, before there is one."""
    tile_rows = prefill_config(config.kv_format.head_dim).tile_tokens
    return ShapeTable(config.max_num_seqs, config.max_step_tokens, tile_rows)


def _load(
    config: ExecutorConfig,
    checkpoint: Checkpoint,
    runtime: Runtime,
    choose: ChooseLinear | None,
    kernels: Readiness | None,
) -> GraphExecutor:
    device = runtime.device
    with runtime.stream():
        pool = KVPool(config.kv_format, config.kv_blocks, device=str(device))
        # Attention masks what lies past a row's end, but a weight of zero times a stranger's NaN would still be NaN.
        pool.storage.zero_()
        model = load_step_model(checkpoint, pool, device, _limits(config, device, choose))
        if config.quantization in ROUNDED_BITS:
            runtime.release()  # what weights were rounded from, gigabytes in pieces that no step wants
    return GraphExecutor(config, model, runtime, kernels, pool.storage)


def limits(config: ExecutorConfig, gpu: str, sms: int, choose: ChooseLinear | None = None) -> Limits:
    """For the GPU that the driver calls ``gpu``, with its stored configs or those of ``choose``."""

    def stored(kind: OpKind, n: int, k: int, rows: int, format: str) -> AnyConfig:
        return product_config(kind, n, k, rows, format, gpu)

    return Limits(
        config.max_model_len, config.max_num_seqs, sms, choose or stored, config.deterministic, config.quantization
    )


def _limits(config: ExecutorConfig, device: torch.device, choose: ChooseLinear | None) -> Limits:
    if device.type != "cuda":
        return limits(config, device.type, 16, choose)
    properties = torch.cuda.get_device_properties(device)
    return limits(config, properties.name, properties.multi_processor_count, choose)


def _plan(config: ExecutorConfig, runtime: Runtime) -> str:
    """What was asked for, and how much would have to go."""
    free, total = torch.cuda.mem_get_info(runtime.device)
    kv = config.kv_blocks * config.kv_format.bytes_per_block
    per_token = config.kv_format.bytes_per_token
    return (
        f"the GPU's memory does not suffice: {free / GIB:.1f} of {total / GIB:.1f} GiB are free with "
        f"{torch.cuda.memory_allocated(runtime.device) / GIB:.1f} GiB in use here, of which the KV cache is "
        f"{kv / GIB:.1f} GiB ({config.kv_blocks} blocks, {per_token} B a token). Lower kv_memory by some GiB, lower "
        f"max_model_len ({config.max_model_len}) or max_num_seqs ({config.max_num_seqs}), or end what else uses the GPU"
    )
