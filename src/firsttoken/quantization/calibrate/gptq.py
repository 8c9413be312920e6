"""GPTQ (Frantar et al., 2023): columns are rounded one after the other, and those to come make up for the error.

Columns go in the order of their activations' size, groups and scales stay those of the matrix as it lies, so a file
needs no permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.quantization.calibrate.grid import Grid, safe

# A hundred times what is usual: inputs of another kind of text than was calibrated on go together in other ways. On two
# layers of SmolLM2, KL on other text was 0.025 with 0.01, 0.019 with 0.1 and 0.015 with 1.
DAMPING = 1.0
_BLOCK = 128
# Each failed factorisation damps ten times as much: beyond the last, the matrix is its own diagonal.
_ATTEMPTS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """Of inputs' second moments: ``order`` of columns, and ``upper`` float32 ``[K, K]``, the Cholesky factor of the
    inverse in that order."""

    order: Tensor
    upper: Tensor


def damped(moments: Tensor, damping: float = DAMPING) -> Tensor:
    """``moments`` ``[K, K]`` in float64 with ``damping`` times the mean of its diagonal added to it. Inputs that were
    always zero count as small ones: nothing is known of them, and nothing else may make up for their weights."""
    wide = moments.double()
    diagonal = wide.diagonal()
    mean = diagonal.mean()
    added = torch.where(diagonal > 0, mean * damping, mean if mean > 0 else torch.ones_like(mean))
    return wide + torch.diag(added)


def factor(moments: Tensor) -> Factor:
    """Raises nothing: a singular matrix is damped until it can be factored."""
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    damping = DAMPING
    for _ in range(_ATTEMPTS):
        wide = damped(moments, damping)[order][:, order]
        lower, failed = torch.linalg.cholesky_ex(wide)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed) and bool(torch.isfinite(upper).all()):
                return Factor(order, upper.float())
        damping *= 10
    return Factor(order, torch.diag(damped(moments).diagonal()[order].rsqrt()).float())


def gptq(weight: Tensor, scales: Tensor, grid: Grid, found: Factor) -> Tensor:
    """Codes float32 ``[N, K]`` for ``weight`` float32 ``[N, K]`` with ``scales`` ``[N, groups]`` given."""
    k = weight.shape[1]
    left = weight[:, found.order].contiguous()
    spread = safe(grid.spread(scales, k)[:, found.order])
    codes = torch.empty_like(left)
    for first in range(0, k, _BLOCK):
        block = slice(first, min(first + _BLOCK, k))
        errors = _block(left[:, block], spread[:, block], found.upper[block, block], grid, codes[:, block])
        left[:, block.stop :] -= errors @ found.upper[block, block.stop :]
    out = torch.empty_like(codes)
    out[:, found.order] = codes
    return out


def _block(left: Tensor, spread: Tensor, upper: Tensor, grid: Grid, codes: Tensor) -> Tensor:
    """Rounds the columns ``left`` into ``codes``; gives each one's error over its diagonal, for the columns after."""
    rows = left.t().contiguous()  # a column is contiguous here
    scale = spread.t().contiguous()
    errors = torch.empty_like(rows)
    diagonal = upper.diagonal().tolist()
    for i in range(len(rows)):
        code = grid.codes(rows[i] / scale[i])
        codes[:, i] = code
        errors[i] = (rows[i] - code * scale[i]) / diagonal[i]
        rows[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return errors.t()
