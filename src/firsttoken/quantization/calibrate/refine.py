"""What GPTQ leaves: codes moved one at a time where that lowers the error, scales fitted to the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.quantization.calibrate.grid import Grid, safe

_BLOCK = 128


def descend(target: Tensor, codes: Tensor, scales: Tensor, grid: Grid, moments: Tensor, order: Tensor) -> Tensor:
    """One round of coordinate descent: each column's codes become the best for the others as they stand.

    ``target`` and ``codes`` ``[N, K]``, ``moments`` ``[K, K]``; the error ``tr(E moments E^T)`` never grows.
    """
    k = target.shape[1]
    spread = grid.spread(scales, k)[:, order]
    values = codes[:, order] * spread
    mixed = moments[order][:, order]
    wanted = target[:, order]
    out = torch.empty_like(values)
    for first in range(0, k, _BLOCK):
        block = slice(first, min(first + _BLOCK, k))
        slope = ((values - wanted) @ mixed[:, block]).t().contiguous()
        rows, scale = values[:, block].t().contiguous(), safe(spread[:, block].t().contiguous())
        inside = mixed[block, block]
        diagonal = inside.diagonal().tolist()
        for i in range(len(rows)):
            best = grid.codes((rows[i] - slope[i] / diagonal[i]) / scale[i]) * scale[i]
            slope.addr_(inside[i], best - rows[i])
            rows[i] = best
        values[:, block] = rows.t()
    out[:, order] = (values / safe(spread)).round() if grid.format != "fp8" else values / safe(spread)
    return grid.codes(out)


def fitted_scales(target: Tensor, codes: Tensor, scales: Tensor, grid: Grid, moments: Tensor) -> Tensor:
    """For codes that are given, the scales ``[N, groups]`` of the least error: a small linear system for each row."""
    n, k = codes.shape
    size = grid.size(k)
    groups = k // size
    system = torch.empty((n, groups, groups), dtype=torch.float32, device=codes.device)
    for group in range(groups):
        columns = slice(group * size, (group + 1) * size)
        mixed = (codes[:, columns] @ moments[columns]).mul_(codes)
        system[:, group] = mixed.view(n, groups, size).sum(-1)
    right = ((target @ moments) * codes).view(n, groups, size).sum(-1)
    diagonal = system.diagonal(dim1=1, dim2=2)
    ridge = diagonal.mean(1, keepdim=True).clamp_min(1e-20) * 1e-4
    # Beside the old scales, so that a group that hardly matters keeps its own.
    system = system + torch.diag_embed(ridge.expand(n, groups))
    fitted = torch.linalg.solve(system, (right + ridge * scales).unsqueeze(-1)).squeeze(-1)
    usable = torch.isfinite(fitted) & (scales != 0)
    return grid.stored(torch.where(usable, fitted, scales))
