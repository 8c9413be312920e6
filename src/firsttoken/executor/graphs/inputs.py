"""One step's inputs: packed on the host into a pinned ring slot, copied to the device in one piece.

The device buffer is one int32 array. For a given `StepShape` its parts lie at fixed offsets, so that a graph captured
for the shape always reads the same memory::

    slots[T] | positions[T] | patches[P, 3] | tiles[NT, 4] | sample rows[R] | sample slots[R] | positions[R]

``patches`` are ``(slot, index, block)``: blocks appended to the tables of rows that are running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.plan import RowWork, StepPlan
from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.kernels.paged_attention.gpu_config import make_tiles
from firsttoken.models.step_view import StepView

PATCH_WORDS = 3
TILE_WORDS = 4
# Shapes whose views are kept; the oldest gives way.
MOST_PREPARED = 256


def _align(words: int) -> int:
    return -(-words // 16) * 16


class StepLayout:
    """Where each part of a shape's inputs lies, in words, and ``template``: the inputs when every row is padding."""

    __slots__ = (
        "patches",
        "positions",
        "sample_positions",
        "sample_rows",
        "sample_slots",
        "shape",
        "slots",
        "template",
        "tiles",
        "words",
    )

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        t, r = _align(shape.tokens), _align(shape.samples)
        self.slots = 0
        self.positions = t
        self.patches = self.positions + t
        self.tiles = self.patches + _align(PATCH_WORDS * self.num_patches)
        self.sample_rows = self.tiles + _align(TILE_WORDS * shape.tiles)
        self.sample_slots = self.sample_rows + r
        self.sample_positions = self.sample_slots + r
        self.words = self.sample_positions + r
        self.template = np.zeros(self.words, dtype=np.int32)
        self.template[self.positions : self.tiles] = -1
        self.template[self.sample_slots :] = -1
        if shape.decode_only:
            self.template[self.sample_rows : self.sample_rows + shape.samples] = np.arange(shape.samples)

    @property
    def num_patches(self) -> int:
        """A decode row gets at most one block a step; one more lets a shape without decode rows be captured alike."""
        return max(1, self.shape.decode_rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A shape's inputs in one place of the ring: the same pinned memory twice, and where it goes on the device."""

    words: NDArray[np.int32]
    pinned: Tensor
    device: Tensor

    def send(self) -> None:
        self.device.copy_(self.pinned, non_blocking=True)


class _Prepared:
    """A shape's layout, and its views of each place of the ring, so that a step makes none."""

    __slots__ = ("layout", "places")

    def __init__(self, shape: StepShape, ring: Sequence[Tensor], buffer: Tensor) -> None:
        self.layout = layout = StepLayout(shape)
        parts = [slot[: layout.words] for slot in ring]
        self.places = [_Place(part.numpy(), part, buffer[: layout.words]) for part in parts]


class StepInputs:
    """The device buffer and the pinned ring before it: one place more than steps in flight."""

    def __init__(self, table: ShapeTable, ring: Sequence[Tensor], device: torch.device) -> None:
        self._table = table
        self._ring = ring
        self._buffer = torch.zeros(ring[0].shape[0], dtype=torch.int32, device=device)
        self._prepared: dict[StepShape, _Prepared] = {}

    def layout(self, shape: StepShape) -> StepLayout:
        return self._of(shape).layout

    def _of(self, shape: StepShape) -> _Prepared:
        prepared = self._prepared.get(shape)
        if prepared is None:
            if len(self._prepared) == MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            prepared = self._prepared[shape] = _Prepared(shape, self._ring, self._buffer)
        return prepared

    def view(self, shape: StepShape, tokens: Tensor, block_tables: Tensor, *, pdl: bool) -> StepView:
        """The device views of a step of this shape."""
        layout, b = self.layout(shape), self._buffer

        def part(begin: int, count: int) -> Tensor:
            return b[begin : begin + count]

        return StepView(
            tokens=tokens,
            block_tables=block_tables,
            slots=part(layout.slots, shape.tokens),
            positions=part(layout.positions, shape.tokens),
            patches=part(layout.patches, PATCH_WORDS * layout.num_patches).view(-1, PATCH_WORDS),
            tiles=part(layout.tiles, TILE_WORDS * shape.tiles).view(-1, TILE_WORDS),
            sample_rows=part(layout.sample_rows, shape.samples),
            sample_slots=part(layout.sample_slots, shape.samples),
            sample_positions=part(layout.sample_positions, shape.samples),
            decode_rows=shape.decode_rows,
            identity=shape.decode_only,
            pdl=pdl,
        )

    def pad(self, shape: StepShape, index: int) -> None:
        """Inputs of a step in which every row is padding: what a graph is warmed up and captured with."""
        prepared = self._of(shape)
        place = prepared.places[index]
        place.words[:] = prepared.layout.template
        place.send()

    def pack(self, plan: StepPlan, shape: StepShape, patches: list[tuple[int, int, int]], index: int) -> None:
        """Write a plan's inputs to a place of the ring and start the copy to the device. ``patches`` must fit."""
        prepared = self._of(shape)
        layout, place, work = prepared.layout, prepared.places[index], plan.work
        words = place.words
        words[:] = layout.template
        if patches:
            words[layout.patches : layout.patches + PATCH_WORDS * len(patches)] = np.array(patches).ravel()
        decodes = len(work)
        if not shape.decode_only:
            # Without decode rows in the shape, a row of one token is a chunk like others.
            decodes = sum(row.count == 1 and row.sample for row in work) if shape.decode_rows else 0
        slots, starts = [row.slot for row in work[:decodes]], [row.start for row in work[:decodes]]
        words[:decodes] = slots
        words[layout.positions : layout.positions + decodes] = starts
        words[layout.sample_slots : layout.sample_slots + decodes] = slots
        words[layout.sample_positions : layout.sample_positions + decodes] = starts
        words[layout.sample_positions : layout.sample_positions + decodes] += 1
        if not shape.decode_only:
            words[layout.sample_rows : layout.sample_rows + decodes] = np.arange(decodes)
            self._pack_chunks(words, layout, work[decodes:], decodes)
        place.send()

    def _pack_chunks(self, words: NDArray[np.int32], layout: StepLayout, chunks: list[RowWork], sampled: int) -> None:
        """Fill token rows, tiles and samples of the chunks, which come behind ``sampled`` samples of decode rows."""
        counts = np.array([row.count for row in chunks], dtype=np.int32)
        starts = np.array([row.start for row in chunks], dtype=np.int32)
        slots = np.array([row.slot for row in chunks], dtype=np.int32)
        samples = np.array([row.sample for row in chunks], dtype=np.bool_)
        ends = np.cumsum(counts)
        first = ends - counts
        total = int(ends[-1])
        at = layout.shape.decode_rows
        words[layout.slots + at : layout.slots + at + total] = np.repeat(slots, counts)
        words[layout.positions + at : layout.positions + at + total] = np.arange(total) + np.repeat(
            starts - first, counts
        )
        tiles = make_tiles(starts, counts, slots, first + at, self._table.tile_rows)
        words[layout.tiles : layout.tiles + tiles.size] = tiles.ravel()
        end = sampled + int(samples.sum())
        words[layout.sample_rows + sampled : layout.sample_rows + end] = (ends - 1 + at)[samples]
        words[layout.sample_slots + sampled : layout.sample_slots + end] = slots[samples]
        words[layout.sample_positions + sampled : layout.sample_positions + end] = (starts + counts)[samples]
