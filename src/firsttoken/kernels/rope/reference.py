"""RoPE by sine and cosine of each pair, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.kernels.rope.table import RopeTable


def apply_rope(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    """Rotate neighbours ``(2i, 2i + 1)`` of ``x [T, heads, head_dim]`` by ``position * inv_freq[i]``; gives float64."""
    wide = x.double()
    # The angle itself is a float32 product: that rounding belongs to the models' definition.
    angles = (positions.float()[:, None, None] * table.inv_freq).double()
    cos, sin = angles.cos() * table.scaling, angles.sin() * table.scaling
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
