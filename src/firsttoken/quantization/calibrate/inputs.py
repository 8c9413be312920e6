"""What calibration knows of the inputs of some linears: their second moments, and a few kept to judge by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """``moments`` ``[K, K]``: the mean of ``x x^T`` over the inputs as they are once all before is rounded; ``cross``:
    of ``x y^T``, y being the same inputs with weights in full. ``held`` and ``held_full`` ``[T, K]``, x and y of tokens
    that took no part in either. All float32.
    """

    moments: Tensor
    cross: Tensor
    held: Tensor
    held_full: Tensor

    def scaled(self, scale: Tensor) -> Inputs:
        """With column j of each input divided by ``scale[j]``, where the weights' columns are multiplied by it; what
        inputs are in full stays as it is."""
        inverse = 1 / scale
        return Inputs(
            self.moments * inverse[:, None] * inverse[None, :],
            self.cross * inverse[:, None],
            self.held * inverse,
            self.held_full,
        )


class InputMoments:
    """Gathers `Inputs` batch by batch."""

    def __init__(self) -> None:
        self._moments: Tensor | None = None
        self._cross: Tensor | None = None
        self._held: list[Tensor] = []
        self._held_full: list[Tensor] = []
        self._tokens = 0

    def add(self, x: Tensor, full: Tensor) -> None:
        """``x`` and ``full`` float32 ``[T, K]``."""
        if self._moments is None or self._cross is None:
            self._moments = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
            self._cross = torch.zeros_like(self._moments)
        self._moments.addmm_(x.t(), x)
        self._cross.addmm_(x.t(), full)
        self._tokens += len(x)

    def hold(self, x: Tensor, full: Tensor) -> None:
        """Keep ``x`` and ``full`` to judge by."""
        self._held.append(x)
        self._held_full.append(full)

    def inputs(self) -> Inputs:
        """What was gathered. At least one batch was added, and one held."""
        assert self._moments is not None
        assert self._cross is not None
        return Inputs(
            self._moments.div_(self._tokens),
            self._cross.div_(self._tokens),
            torch.cat(self._held),
            torch.cat(self._held_full),
        )
