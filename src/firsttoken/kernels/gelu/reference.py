"""GELU's tanh form as written, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`` in float64."""
    wide = x.double()
    return wide / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gate_up [T, 2 n]``, the gate in the first half -> ``[T, n]`` float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gelu(gate) * up
