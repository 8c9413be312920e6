"""GELU by torch's own kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """The tanh form, element by element, in ``x``'s dtype."""
    return F.gelu(x, approximate="tanh")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gate_up [T, 2 n]``, the gate in the first half -> ``gelu(gate) * up [T, n]`` in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)
