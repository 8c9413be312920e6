"""Weights on a device with kernels of its own: one bfloat16 matrix for each fused projection, in the kernels' order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.kernels.rope import to_pair_order
from firsttoken.models.weights import Weights
from firsttoken.quantization.stored import FLOAT_TYPES, StoredTensor


class DeviceWeights:
    """Takes tensors by name and lays them out on ``device``."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._weights = weights
        self.device = device
        self.dtype = dtype

    def vector(self, name: str) -> Tensor:
        """Float32 ``[n]``."""
        return self._weights.vector(name).to(self.device)

    def vectors(self, names: Sequence[str], rotated_heads: Sequence[int]) -> Tensor:
        """Several vectors end to end, float32; those with heads to rotate in pair order."""
        parts = [self.vector(name) for name in names]
        return torch.cat(
            [to_pair_order(part, heads) if heads else part for part, heads in zip(parts, rotated_heads, strict=True)]
        )

    def matrix(self, name: str) -> Tensor:
        """``[N, K]`` as stored."""
        stored = self._weights.matrix(name)
        out = torch.empty(stored.shape, dtype=self.dtype, device=self.device)
        self._fill(out, stored)
        return out

    def stacked(self, names: Sequence[str], rotated_heads: Sequence[int]) -> Tensor:
        """Matrices of the same K below each other; those with heads to rotate have their rows in pair order."""
        parts = [self._weights.matrix(name) for name in names]
        rows = [part.shape[0] for part in parts]
        out = torch.empty((sum(rows), parts[0].shape[1]), dtype=self.dtype, device=self.device)
        for part, place, heads in zip(parts, torch.split(out, rows), rotated_heads, strict=True):
            self._fill(place, part)
            if heads:
                place.copy_(to_pair_order(place, heads).clone())
        return out

    def interleaved(self, first: str, second: str) -> Tensor:
        """``[2 N, K]`` with rows of the two matrices in turn."""
        parts = [self._weights.matrix(name) for name in (first, second)]
        out = torch.empty((parts[0].shape[0], 2, parts[0].shape[1]), dtype=self.dtype, device=self.device)
        for index, part in enumerate(parts):
            out[:, index].copy_(self._on_device(part))
        return out.view(-1, out.shape[2])

    def interleaved_vectors(self, first: str, second: str) -> Tensor:
        return torch.stack((self.vector(first), self.vector(second)), dim=1).flatten()

    def _on_device(self, stored: StoredTensor) -> Tensor:
        out = torch.empty(stored.shape, dtype=self.dtype, device=self.device)
        self._fill(out, stored)
        return out

    def _fill(self, out: Tensor, stored: StoredTensor) -> None:
        if stored.type in FLOAT_TYPES:
            out.copy_(stored.data)
        else:
            out.copy_(stored.dequantize(self.dtype))
