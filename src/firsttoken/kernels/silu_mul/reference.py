"""SwiGLU's gate as written, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """``gate_up [T, 2 n]``, the gate in the first half -> ``[T, n]`` float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def silu_mul_interleaved(gate_up: Tensor) -> Tensor:
    """The same with gate and up in alternating columns: ``[T, 2 n]`` -> ``[T, n]`` float64."""
    gate, up = gate_up[:, 0::2].double(), gate_up[:, 1::2].double()
    return gate * torch.sigmoid(gate) * up
