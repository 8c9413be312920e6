"""The projections of a layer for more rows than the small kernels serve best, with the norms before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.config import SHARED_FLOATS, SHARED_TILES
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.packed_linear.rounded import config_for, round_rows, rounded_linear
from firsttoken.kernels.rms_norm.triton import add_rms_norm
from firsttoken.kernels.silu_mul.triton import silu_mul
from firsttoken.models.projection import Projection


class ManyRows(Protocol):
    """Rows are bfloat16; ``gain`` float32 is that of the norm before a projection."""

    def normed(self, hidden: Tensor, gain: Tensor, projection: Projection) -> Tensor:
        """The projection of ``hidden``'s norm, gated where it is of that kind."""
        ...

    def add(self, hidden: Tensor, x: Tensor, projection: Projection) -> None:
        """Add the projection of ``x`` to ``hidden``."""
        ...


class LibraryProducts:
    """bfloat16 weights, multiplied by the vendor's library."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def normed(self, hidden: Tensor, gain: Tensor, projection: Projection) -> Tensor:
        normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        add_rms_norm(hidden, None, gain, self._eps, normed)
        product = _product(normed, projection)
        if projection.kind != "gated":
            return product
        gated = _empty(hidden, product.shape[1] // 2)
        silu_mul(product, gated)
        return gated

    def add(self, hidden: Tensor, x: Tensor, projection: Projection) -> None:
        """In full precision by the product's own last step: a kernel of its own would move twice as much memory."""
        if x.is_meta:
            return
        hidden.addmm_(x, projection.matrix.t())
        if projection.bias is not None:
            hidden.add_(projection.bias)


def _product(x: Tensor, projection: Projection) -> Tensor:
    weight = projection.matrix
    # On the meta device, where kernels are only compiled, a product makes torch import its tracer.
    if x.is_meta:
        return _empty(x, len(weight))
    if projection.bias is None:
        return torch.mm(x, weight.t())
    return torch.addmm(projection.bias, x, weight.t())


class RoundedProducts:
    """Packed weights: rows are rounded to FP8, with the norm before, and multiplied with what stands after fused in.
    Projections that a file holds in full go to ``full``."""

    def __init__(self, full: ManyRows, eps: float, weights: Sequence[PackedWeight]) -> None:
        """For ``weights``, whose products follow each other and share work space."""
        self._full = full
        self._eps = eps
        device = weights[0].words.device
        self._workspace = Workspace.allocate(SHARED_FLOATS, SHARED_TILES, device)
        sizes = [w.n * -(-w.k // 64) * 64 for w in weights if w.format == "int4"]
        # Where int4 weights are FP8 for a product.
        self._scratch = torch.empty(max(sizes), dtype=torch.uint8, device=device) if sizes else None

    def normed(self, hidden: Tensor, gain: Tensor, projection: Projection) -> Tensor:
        if isinstance(projection.weight, Tensor):
            return self._full.normed(hidden, gain, projection)
        weight, gated = projection.weight, projection.kind == "gated"
        config = config_for(weight, len(hidden))
        rows = round_rows(hidden, weight, config=config, gain=gain, eps=self._eps)
        out = _empty(hidden, weight.n // 2 if gated else weight.n)
        rounded_linear(
            rows, weight, out, workspace=self._workspace, scratch=self._scratch, config=config, bias=projection.bias,
            gated=gated,
        )  # fmt: skip
        return out

    def add(self, hidden: Tensor, x: Tensor, projection: Projection) -> None:
        if isinstance(projection.weight, Tensor):
            self._full.add(hidden, x, projection)
            return
        weight = projection.weight
        config = config_for(weight, len(x))
        rounded_linear(
            round_rows(x, weight, config=config), weight, hidden, workspace=self._workspace, scratch=self._scratch,
            config=config, bias=projection.bias, residual=hidden,
        )  # fmt: skip


def _empty(like: Tensor, columns: int) -> Tensor:
    return torch.empty((len(like), columns), dtype=like.dtype, device=like.device)
