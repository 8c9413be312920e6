"""The small linear product and its neighbours' arithmetic in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from firsttoken.kernels.linear.config import OpKind


class Expected(NamedTuple):
    """float64 results: ``out`` as the kernel's ``kind`` gives it, and what a residual producer prepares."""

    out: Tensor
    scaled: Tensor | None = None
    squares: Tensor | None = None


def linear(
    x: Tensor,
    weight: Tensor,
    kind: OpKind,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float, int] | None = None,
    residual: Tensor | None = None,
    next_gain: Tensor | None = None,
) -> Expected:
    """``x [M, K]`` by ``weight [N, K]``, with the arguments of `small_linear`.

    ``norm`` is ``(partial sums of squares [M, P], eps, width)`` of the row that ``x`` is the unnormalised, scaled form
    of. ``squares`` of the result are whole sums ``[M]``.
    """
    y = x.double() @ weight.double().T
    if norm is not None:
        squares, eps, width = norm
        y *= (squares.double().sum(-1, keepdim=True) / width + eps).rsqrt()
    if bias is not None:
        y += bias.double()
    if kind == "gated":
        gate, up = y[:, 0::2], y[:, 1::2]
        return Expected(gate * torch.sigmoid(gate) * up)
    if residual is not None:
        y += residual.double()
    if next_gain is None:
        return Expected(y)
    return Expected(y, y * next_gain.double(), y.square().sum(-1))


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Value and index ``[M]`` of each row's largest logit: NaN above all, the lowest index at ties."""
    # argmax knows NaN but promises nothing at ties.
    top = logits.max(-1, keepdim=True).values
    hits = torch.where(top.isnan(), logits.isnan(), logits == top)
    index = torch.where(hits, torch.arange(logits.shape[1], device=logits.device), logits.shape[1]).min(-1).values
    return top[:, 0], index
