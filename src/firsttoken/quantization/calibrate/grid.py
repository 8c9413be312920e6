"""The values that a format can hold, and the scales that suit weights best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.packed_linear.layout import FP8_MAX
from firsttoken.quantization.rounded import RoundedFormat

# Finer than what is tried when models are loaded, and with signs turned around.
TURNED = tuple(sign * (1.0 - 0.02 * step) for sign in (1, -1) for step in range(16))


@dataclass(frozen=True, slots=True)
class Grid:
    """``format`` with one scale for ``group`` columns of a row, or for the whole row where ``group`` is 0.

    Scales are float32 ``[N, groups]`` and hold what the file will: bfloat16 numbers for integers.
    """

    format: RoundedFormat
    group: int

    def size(self, columns: int) -> int:
        """Columns that share a scale. Raises `ConfigError` where they do not divide ``columns``."""
        if self.group and columns % self.group:
            raise ConfigError(f"groups of {self.group} do not divide {columns} columns: choose another group size")
        return self.group or columns

    @property
    def largest(self) -> float:
        """The largest code."""
        return {"int4": 7.0, "int8": 127.0, "fp8": FP8_MAX}[self.format]

    def stored(self, scales: Tensor) -> Tensor:
        """``scales`` as the file will hold them."""
        return scales.float() if self.format == "fp8" else scales.bfloat16().float()

    def codes(self, scaled: Tensor) -> Tensor:
        """Weights over their scales -> the nearest codes, as float32."""
        if self.format == "fp8":
            return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        return scaled.round().clamp_(-self.largest - 1, self.largest)

    def spread(self, scales: Tensor, columns: int) -> Tensor:
        """The scale of each weight, ``[N, columns]``."""
        return scales.repeat_interleave(self.size(columns), 1)

    def nearest(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Codes ``[N, K]`` of ``weight`` by rounding alone."""
        return self.codes(weight / self.spread(safe(scales), weight.shape[1]))

    def scales(self, weight: Tensor, shrink: Sequence[float], importance: Tensor | None = None) -> Tensor:
        """For ``weight`` ``[N, K]``, of the scales that shrink each group's largest those of the least squared error;
        a negative factor turns the signs around, which matters where there is a code more below 0 than above.
        ``importance`` ``[K]`` weighs the columns."""
        n, k = weight.shape
        grouped = weight.view(n, -1, self.size(k))
        weighing = None if importance is None else importance.view(1, -1, self.size(k))
        largest = grouped.abs().amax(-1, keepdim=True)
        best = torch.full_like(largest, float("inf"))
        chosen = self.stored(largest * (shrink[0] / self.largest))  # where all squares overflow
        for factor in shrink:
            scale = self.stored(largest * (factor / self.largest))
            error = (self.codes(grouped / safe(scale)) * scale - grouped).square_()
            total = (error if weighing is None else error.mul_(weighing)).sum(-1, keepdim=True)
            better = total < best
            best = torch.where(better, total, best)
            chosen = torch.where(better, scale, chosen)
        return chosen.squeeze(-1)


def safe(scales: Tensor) -> Tensor:
    """``scales`` to divide by: a group of zeros has the scale 0."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)
