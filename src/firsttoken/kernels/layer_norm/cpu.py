"""Layer normalisation by torch's own fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerNorm:
    """Normalises the last dimension of a float32 tensor; the result has ``out_dtype``. ``weight``, ``bias`` ``[n]``."""

    __slots__ = ("bias", "eps", "out_dtype", "weight")

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype) -> None:
        self.weight = weight.float()
        self.bias = bias.float()
        self.eps = eps
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, n]`` float32 -> ``[T, n]`` in ``out_dtype``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).to(self.out_dtype)
