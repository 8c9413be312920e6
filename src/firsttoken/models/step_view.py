"""A step as a model on a device with graphs sees it, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepView:
    """Views of device memory, int32, at the same place for every step of a shape. Padding rows have position -1,
    padding tiles count 0, padding samples slot -1 (and row 0).

    ``tokens [slots, L]`` and ``block_tables [slots, W]`` are the device rows. The first ``decode_rows`` token rows
    compute one token each; ``tiles [NT, 5]`` (see `gpu_config.make_tiles`) cover the others.
    ``patches [P, 3]`` (slot, index, block) are blocks that the step appends to tables. ``identity``: the samples are
    the token rows, in order. ``pdl``: kernels may begin before those ahead of them have ended.
    """

    tokens: Tensor
    block_tables: Tensor
    slots: Tensor
    positions: Tensor
    patches: Tensor
    tiles: Tensor
    sample_rows: Tensor
    sample_slots: Tensor
    sample_positions: Tensor
    decode_rows: int
    identity: bool
    pdl: bool


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """``values [R, V]`` float32; ``best``, where the head leaves it, the maxima (float32) and their ids (int32) of each
    part of the vocabulary, ``[R, P]`` both."""

    values: Tensor
    best: tuple[Tensor, Tensor] | None


@dataclass(slots=True, eq=False)
class Kept:
    """Token rows (int64 ``[K]``) whose hidden states after the final norm a step leaves here, ``[K, H]``, besides the
    logits of its samples, which are the same as without."""

    rows: Tensor
    hidden: Tensor | None = None


class StepModel(Protocol):
    """Reads everything about the step from device memory and never waits for it, so that a graph can hold it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all kept weights."""
        ...

    @property
    def tile_rows(self) -> int:
        """The most queries that one attention tile takes."""
        ...

    def forward(self, step: StepView, kept: Kept | None = None) -> Logits | None:
        """Write the step's K and V; the logits of its samples, None when it has none. Steps that keep hidden states
        are in no graph."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, H]``, as kept, to ``[R, V]`` float32."""
        ...
