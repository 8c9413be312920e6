"""From hidden state to logits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from firsttoken.quantization import Linear
from firsttoken.quantization.row_table import RowTable

# How many of the most likely tokens get exact logits, and how many rows are refined at a time (bounds memory).
REFINED = 32
_ROWS_AT_ONCE = 32


class Head(Protocol):
    """``hidden [R, H] -> logits [R, vocab]`` float32."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, hidden: Tensor) -> Tensor: ...


class FullHead:
    """One product whose result is precise enough as it is (float32)."""

    __slots__ = ("linear",)

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).float()


class CappedHead:
    """Another head's logits ``x`` as ``cap * tanh(x / cap)``."""

    __slots__ = ("cap", "head")

    def __init__(self, head: Head, cap: float) -> None:
        self.head = head
        self.cap = cap

    @property
    def nbytes(self) -> int:
        return self.head.nbytes

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).div_(self.cap).tanh_().mul_(self.cap)


class RefinedHead:
    """A bfloat16 product, then float32 logits for the `REFINED` most likely tokens of each row.

    A bfloat16 result around 20 moves in steps of 1/8, which ties the leading tokens and lets the lower id win. The
    second look costs 2 to 3 % of a step and takes stored weights, so what matters for sampling is not rounded at all.
    """

    __slots__ = ("linear", "table")

    def __init__(self, linear: Linear, table: RowTable) -> None:
        self.linear = linear
        self.table = table

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, hidden: Tensor) -> Tensor:
        coarse = self.linear(hidden)
        logits = coarse.float()
        for first in range(0, hidden.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            self._refine(hidden[rows], coarse[rows], logits[rows])
        return logits

    def _refine(self, hidden: Tensor, coarse: Tensor, logits: Tensor) -> None:
        count = min(REFINED, coarse.shape[1])
        tokens = torch.topk(coarse, count, dim=-1, sorted=False).indices
        weights = self.table.rows(tokens.view(-1)).view(*tokens.shape, -1)
        # A batch of matrix-vector products by bmm takes seven times as long.
        exact = weights.mul_(hidden.float().unsqueeze(1)).sum(-1)
        logits.scatter_(1, tokens, exact)
