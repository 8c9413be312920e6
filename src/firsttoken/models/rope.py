"""Inverse frequencies for each rope kind that a checkpoint may name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import RopeConfig
from firsttoken.core.errors import CheckpointError
from firsttoken.kernels.rope import RopeTable

KINDS = ("default", "linear", "llama3", "yarn")


def rope_table(rope: RopeConfig, head_dim: int, max_position: int, device: str = "cpu") -> RopeTable:
    """The table of ``rope`` for ``head_dim``; ``max_position`` stands in for a missing original length.

    Raises `CheckpointError` for an unknown kind.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / rope.theta**exponents
    original = rope.original_max_position or max_position
    scaling = 1.0
    match rope.kind:
        case "default":
            inv_freq = base
        case "linear":
            inv_freq = base / rope.factor
        case "llama3":
            inv_freq = _llama3(base, rope, original)
        case "yarn":
            inv_freq, scaling = _yarn(base, rope, head_dim, original), _yarn_scaling(rope)
        case unknown:
            raise CheckpointError(f"unknown rope kind {unknown!r}: known are {', '.join(KINDS)}", field="rope")
    return RopeTable(inv_freq.to(device), scaling)


def _llama3(base: Tensor, rope: RopeConfig, original: int) -> Tensor:
    """Llama 3.1's rule: long wavelengths are stretched, short ones kept, those between blended by wavelength."""
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    stretched = torch.where(wavelength > original / rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(wavelength < original / rope.high_freq_factor, base, stretched)


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int, original: int) -> Tensor:
    """Peng et al., 2023, "YaRN": a ramp over dimensions between stretched and kept frequencies."""

    def dimension(rotations: float) -> float:
        # The (fractional) dimension whose wavelength fits `rotations` times into the original context.
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_scaling(rope: RopeConfig) -> float:
    """YaRN's factor on sine and cosine: stated outright, or by DeepSeek's two mscales, or the paper's rule."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def rule(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return rule(rope.mscale) / rule(rope.mscale_all_dim)
    return rule(1.0)
