"""Weights on a device with kernels of its own: one matrix for each fused projection, in the kernels' order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from firsttoken.kernels.rope import to_pair_order
from firsttoken.models.weights import Weights
from firsttoken.quantization.as_stored import PACKED_FORMATS
from firsttoken.quantization.rounded import RoundedWeight, stack
from firsttoken.quantization.stored import FLOAT_TYPES, StoredTensor

Matrix = Tensor | RoundedWeight


class DeviceWeights:
    """Takes tensors by name and lays them out on ``device``.

    ``keep_rounded``: matrices all of whose parts are stored as rounded numbers of one kind that kernels read stay so;
    all others are in full, in ``dtype``.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        *,
        keep_rounded: bool = False,
    ) -> None:
        self._weights = weights
        self._keep_rounded = keep_rounded
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

    def table(self, name: str) -> Tensor:
        """``[N, K]`` in full."""
        return self._on_device(self._weights.matrix(name))

    def matrix(self, name: str) -> Matrix:
        """``[N, K]``, rows as stored."""
        stored = self._weights.matrix(name)
        return self._stack([stored]) or self._on_device(stored)

    def stacked(self, names: Sequence[str], rotated_heads: Sequence[int]) -> Matrix:
        """Matrices of the same K below each other; those with heads to rotate have their rows in pair order."""
        parts = [self._weights.matrix(name) for name in names]
        rounded = self._stack(
            [
                part.map_rows(partial(to_pair_order, num_heads=heads)) if heads and part.rounded is not None else part
                for part, heads in zip(parts, rotated_heads, strict=True)
            ]
        )
        if rounded is not None:
            return rounded
        rows = [part.shape[0] for part in parts]
        out = torch.empty((sum(rows), parts[0].shape[1]), dtype=self.dtype, device=self.device)
        for part, place, heads in zip(parts, torch.split(out, rows), rotated_heads, strict=True):
            self._fill(place, part)
            if heads:
                place.copy_(to_pair_order(place, heads).clone())
        return out

    def interleaved(self, first: str, second: str) -> Matrix:
        """``[2 N, K]`` with rows of the two matrices in turn."""
        parts = [self._weights.matrix(name) for name in (first, second)]
        rounded = self._stack(parts)
        if rounded is not None:
            return rounded.map_rows(_in_turn)
        out = torch.empty((parts[0].shape[0], 2, parts[0].shape[1]), dtype=self.dtype, device=self.device)
        for index, part in enumerate(parts):
            out[:, index].copy_(self._on_device(part))
        return out.view(-1, out.shape[2])

    def interleaved_vectors(self, first: str, second: str) -> Tensor:
        return torch.stack((self.vector(first), self.vector(second)), dim=1).flatten()

    def _stack(self, parts: Sequence[StoredTensor]) -> RoundedWeight | None:
        """Below each other where they stay rounded; else None."""
        rounded = [part.rounded for part in parts if part.rounded is not None]
        if not self._keep_rounded or len(rounded) < len(parts) or rounded[0].format not in PACKED_FORMATS:
            return None
        return rounded[0] if len(rounded) == 1 else stack(rounded)

    def _on_device(self, stored: StoredTensor) -> Tensor:
        out = torch.empty(stored.shape, dtype=self.dtype, device=self.device)
        self._fill(out, stored)
        return out

    def _fill(self, out: Tensor, stored: StoredTensor) -> None:
        if stored.type in FLOAT_TYPES:
            out.copy_(stored.data)
        else:
            out.copy_(stored.dequantize(self.dtype))


def _in_turn(rows: Tensor) -> Tensor:
    """The rows of the first and of the second half in turn."""
    return rows.view(2, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
