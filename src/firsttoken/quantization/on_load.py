"""Round-to-nearest weights of four or eight bits, made where the weights are while a model is loaded; needs no data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.packed_linear.config import int4_group
from firsttoken.kernels.packed_linear.layout import (
    FP8_MAX,
    GROUPS,
    PackedFormat,
    PackedWeight,
    empty_packed,
    pack_fp8,
    pack_int4,
)
from firsttoken.quantization.rounded import RoundedFormat, RoundedWeight

# What an outlier may lose of its size so that the others are rounded finer; the best is taken, group by group.
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
# int4 has one value more below 0 than above. Where the largest weight becomes -8, by a scale of the other sign if need
# be, all are rounded finer by an eighth, unless the largest of the other side has to lose too much.
_TURNED = (1.0, 0.95, 0.9)
ELEMENTS_AT_ONCE = 1 << 22


def quantized(weight: Tensor, format: PackedFormat, name: str) -> PackedWeight:
    """``weight`` ``[N, K]`` as a GPU's kernels take it. Raises `ConfigError` with ``name`` where its columns do not fit
    groups."""
    n, k = weight.shape
    group = _group(n, k, format, name)
    if weight.is_meta:
        return empty_packed(format, n, k, group if format == "int4" else 0, weight.device)
    made = rounded(weight, format, name)
    return pack_int4(made.values, made.scales) if format == "int4" else pack_fp8(made.values, made.scales)


def rounded(weight: Tensor, format: RoundedFormat, name: str) -> RoundedWeight:
    """``weight`` float ``[N, K]``, rounded. Raises `ConfigError` with ``name`` where its columns do not fit groups."""
    n, k = weight.shape
    if format == "int8":
        return _int8(weight)
    group = _group(n, k, format, name)
    return _int4(weight, group) if format == "int4" else _fp8(weight)


def _group(n: int, k: int, format: RoundedFormat, name: str) -> int:
    group = int4_group(k)
    if group == 0:
        raise ConfigError(
            f"{name} is {n} x {k}: {format} weights need columns in groups of {GROUPS[0]}; use --quantization none"
        )
    return group


def _int4(weight: Tensor, group: int) -> RoundedWeight:
    n, k = weight.shape
    values = torch.empty((n, k), dtype=torch.int8, device=weight.device)
    scales = torch.empty((n, k // group), dtype=torch.bfloat16, device=weight.device)
    for rows in _slabs(n, k):
        chosen, scale = round_groups(weight[rows].float().view(-1, k // group, group))
        values[rows], scales[rows] = chosen.view(-1, k).to(torch.int8), scale
    return RoundedWeight("int4", values, scales, group)


def _int8(weight: Tensor) -> RoundedWeight:
    """A scale a row, of the largest: what an outlier could lose of its size hardly shows in eight bits."""
    scales = (weight.abs().amax(-1).float() / 127).clamp_min(1e-30).bfloat16()
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for rows in _slabs(*weight.shape):
        scaled = weight[rows].float() / scales[rows, None].float()
        values[rows] = scaled.round_().clamp_(-127, 127).to(torch.int8)
    return RoundedWeight("int8", values, scales)


def _slabs(n: int, k: int) -> Iterator[slice]:
    """Rows of few elements, as each takes several float32 on the way."""
    step = max(ELEMENTS_AT_ONCE // k, 1)
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


def round_groups(w: Tensor) -> tuple[Tensor, Tensor]:
    """``w`` float32 ``[N, groups, group]`` -> values -8 to 7 and bf16 scales ``[N, groups]``, of either sign, of least
    squared error among those that shrink the largest."""
    least, most = torch.aminmax(w, dim=-1, keepdim=True)
    largest = torch.maximum(most, -least)
    turned = torch.where(most > -least, -largest, largest)
    # Nothing is less than NaN: the first is taken even where its square overflows.
    best = torch.full_like(largest, float("nan"))
    values, scales = torch.zeros_like(w), torch.zeros_like(largest)
    tried = [largest * (shrink / 7) for shrink in SHRINK] + [turned * (shrink / 8) for shrink in _TURNED]
    for exact in tried:
        scale = exact.bfloat16().float()
        chosen = (w / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)
        error = (chosen * scale - w).square_().sum(-1, keepdim=True)
        better = ~(error >= best)
        best = torch.where(better, error, best)
        values = torch.where(better, chosen, values)
        scales = torch.where(better, scale, scales)
    return values, scales.squeeze(-1).bfloat16()


def _fp8(weight: Tensor) -> RoundedWeight:
    scales = weight.abs().amax(-1).float().clamp_min(1e-12) / FP8_MAX
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in _slabs(*weight.shape):
        values[rows] = (weight[rows].float() / scales[rows, None]).to(torch.float8_e4m3fn)
    return RoundedWeight("fp8", values, scales)
