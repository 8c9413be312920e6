"""SwiGLU's gate in two torch calls."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """``gate_up [T, 2 n]``, the gate in the first half -> ``[T, n]`` in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
