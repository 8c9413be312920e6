"""A linear's weights as numbers of four or eight bits and their scales, before any device's own packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

RoundedFormat = Literal["int4", "int8", "fp8"]
VALUE_DTYPES: dict[RoundedFormat, torch.dtype] = {
    "int4": torch.int8,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """``[N, K]`` weights that are ``(value - zero) * scale``.

    ``values`` is int8 (int4: -8 to 7) or float8_e4m3fn ``[N, K]``; ``scales`` float ``[N, K / group]``, or ``[N]`` with
    ``group`` 0: one for a row. ``zeros`` is int8 in the range of the values, shaped as ``scales``; None: all are 0.
    Raises ValueError where they do not fit each other.
    """

    format: RoundedFormat
    values: Tensor
    scales: Tensor
    group: int = 0
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.values.shape
        if self.values.dtype != VALUE_DTYPES[self.format]:
            raise ValueError(f"{self.format} values are {VALUE_DTYPES[self.format]}, got {self.values.dtype}")
        if self.group < 0 or (self.group and k % self.group):
            raise ValueError(f"groups of {self.group} columns do not divide rows of {k}")
        shape = (n, k // self.group) if self.group else (n,)
        if self.scales.shape != shape or not self.scales.is_floating_point():
            raise ValueError(
                f"scales of {n} x {k} in groups of {self.group} (0: rows) are float {list(shape)}, got "
                f"{self.scales.dtype} {list(self.scales.shape)}"
            )
        if self.zeros is not None and (
            self.format == "fp8" or self.zeros.shape != shape or self.zeros.dtype != torch.int8
        ):
            raise ValueError(
                f"zero points are int8 {list(shape)} of int4 or int8 weights, got {self.zeros.dtype} "
                f"{list(self.zeros.shape)} of {self.format}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k

    @property
    def nbytes(self) -> int:
        """As kept here, where four bits take a byte."""
        return sum(part.nbytes for part in (self.values, self.scales, self.zeros) if part is not None)

    def dequantized(self) -> Tensor:
        """The weights that are meant, float32 ``[N, K]``: one rounding where the scale has more than 16 bits."""
        n, k = self.shape
        # A row is one group of all its columns.
        wide = self.values.float().view(n, -1, self.group or k)
        if self.zeros is not None:
            wide -= self.zeros.float().view(n, -1, 1)
        wide *= self.scales.float().view(n, -1, 1)
        return wide.view(n, k)

    def check_sum(self) -> Tensor:
        """Finite, float32 ``[]`` on the weights' device, if and only if every number is."""
        total = self.scales.sum(dtype=torch.float32)
        if self.format != "fp8":
            return total
        nan = (self.values.view(torch.int8) & 127 == 127).any()  # e4m3 has no infinities
        return torch.where(nan, torch.nan, total)

    def map_rows(self, order: Callable[[Tensor], Tensor]) -> RoundedWeight:
        """``order`` applied to each part: it may move, pick or leave out rows, nothing else."""
        zeros = None if self.zeros is None else order(self.zeros)
        # Not every device moves rows of float8.
        values = order(self.values.view(torch.int8)).view(self.values.dtype)
        return replace(self, values=values, scales=order(self.scales), zeros=zeros)

    def in_groups(self, group: int) -> RoundedWeight:
        """The same weights with a scale for each ``group`` columns, which must divide those that share one now. Raises
        ValueError."""
        now = self.group or self.shape[1]
        if group <= 0 or now % group:
            raise ValueError(f"groups of {now} columns are not made of groups of {group}")
        if group == self.group:
            return self
        spread = [None if part is None else part.view(len(part), -1) for part in (self.scales, self.zeros)]
        scales, zeros = (None if part is None else part.repeat_interleave(now // group, 1) for part in spread)
        assert scales is not None
        return replace(self, group=group, scales=scales, zeros=zeros)


def stack(parts: Sequence[RoundedWeight]) -> RoundedWeight | None:
    """Weights of the same K below each other, exactly; None where their formats or groups differ."""
    first = parts[0]
    if any((part.format, part.group) != (first.format, first.group) for part in parts):
        return None
    kinds = [part.scales.dtype for part in parts]
    wide = kinds[0] if len(set(kinds)) == 1 else torch.float32
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = _below([_zeros(part) for part in parts])
    return RoundedWeight(
        first.format,
        _below([part.values.view(torch.int8) for part in parts]).view(first.values.dtype),
        _below([part.scales.to(wide) for part in parts]),
        first.group,
        zeros,
    )


def _below(parts: Sequence[Tensor]) -> Tensor:
    """Not by torch.cat: on the meta device, where kernels are only compiled, it makes torch import its tracer, for
    seconds."""
    first, rows = parts[0], [len(part) for part in parts]
    out = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
    for place, part in zip(torch.split(out, rows), parts, strict=True):
        place.copy_(part)
    return out


def _zeros(weight: RoundedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.zeros(weight.scales.shape, dtype=torch.int8, device=weight.scales.device)
