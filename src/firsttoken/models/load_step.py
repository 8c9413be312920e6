"""Which kind of step model a checkpoint becomes."""

from __future__ import annotations

import torch

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import ConfigError
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.models.composed import load_composed, outline_composed
from firsttoken.models.load_fused import Limits, load_fused, outline_fused
from firsttoken.models.registry import family_of
from firsttoken.models.step_view import StepModel


def load_step_model(checkpoint: Checkpoint, pool: KVPool, device: torch.device, limits: Limits) -> StepModel:
    """Fused where the family's layers are what the fused kernels compute, else block by block.

    Raises `CheckpointError` for an unknown architecture and for tensors that do not fit the config, `ConfigError` when
    the family cannot be deterministic or its weights not be rounded.
    """
    architecture = checkpoint.config.architecture
    fused = family_of(architecture).fused
    if limits.deterministic and not fused:
        raise ConfigError(f"deterministic is not supported for {architecture}: its products depend on the batch's size")
    if limits.quantization != "none" and not fused:
        raise ConfigError(
            f"quantization {limits.quantization!r} is not supported for {architecture} on this device: use "
            "--quantization none"
        )
    return (load_fused if fused else load_composed)(checkpoint, pool, device, limits)


def outline_step_model(config: ModelConfig, pool: KVPool, limits: Limits) -> StepModel:
    """The same model without weights, on torch's meta device: its steps launch the same kernels, to be compiled alone.

    Raises `CheckpointError` for an unknown architecture.
    """
    fused = family_of(config.architecture).fused
    return (outline_fused if fused else outline_composed)(config, pool, limits)
