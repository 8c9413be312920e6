"""RMSNorm in six torch calls: `torch.rms_norm` has no fused CPU kernel and takes seven."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """Normalises the last dimension of a float32 tensor; the result has ``out_dtype``.

    ``weight`` is ``[n]``. The sum of squares is taken by ``vector_norm`` (a vectorised kernel that keeps float32
    accumulators), rows are independent of each other. A row whose squares overflow becomes NaN.
    """

    __slots__ = ("eps", "inverse_n", "none", "out_dtype", "weight")

    def __init__(self, weight: Tensor, eps: float, out_dtype: torch.dtype) -> None:
        self.weight = weight.float()
        self.eps = torch.full((1, 1), eps, device=weight.device)
        self.none = torch.zeros_like(self.eps)
        self.inverse_n = 1.0 / weight.shape[-1]
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, n]`` float32 -> ``[T, n]`` in ``out_dtype``."""
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        mean = torch.addcmul(self.eps, norm, norm, value=self.inverse_n)
        # Infinity times 0 is NaN. The inverse of an infinite mean would be 0, and the row look like nothing.
        scale = mean.rsqrt().addcmul_(mean, self.none)
        return (x * scale).mul_(self.weight).to(self.out_dtype)
