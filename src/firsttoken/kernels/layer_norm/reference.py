"""Layer normalisation as the paper writes it, in float64."""

from __future__ import annotations

from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension of ``x [..., n]``, in float64."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * scale * weight.double() + bias.double()
