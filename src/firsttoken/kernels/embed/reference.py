"""Embedding lookup in float64, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(tokens: Tensor, slots: Tensor, positions: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows ``table[tokens[slots[t], positions[t]]] * scale`` as float64 ``[T, H]``; zeros at position -1."""
    rows = torch.zeros(slots.shape[0], table.shape[1], dtype=torch.float64, device=table.device)
    for t, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if position >= 0:
            rows[t] = table[tokens[slot, position]].double() * scale
    return rows
