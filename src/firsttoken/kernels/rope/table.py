"""Angles of the rotation, and the order of elements that the kernels expect."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """``inv_freq [head_dim / 2]`` float32 (radians a position) and ``scaling``, the factor on sine and cosine."""

    inv_freq: Tensor
    scaling: float = 1.0

    def rotation(self, positions: Tensor) -> Tensor:
        """Complex factors ``[T, head_dim / 2]`` (complex64) for ``positions [T]`` int64."""
        # Positions up to 2^24 are exact in float32; the product is rounded as in the models' own training code.
        angles = torch.outer(positions.to(torch.float32), self.inv_freq)
        return torch.polar(torch.full_like(angles, self.scaling), angles)


def to_pair_order(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows ``[num_heads * head_dim, ...]`` of a q or k projection so that rotated pairs are neighbours.

    Works on any row data: weights, packed rows, biases, and per-head norm weights (``num_heads`` 1).
    """
    head_dim = rows.shape[0] // num_heads
    halves = rows.reshape(num_heads, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
