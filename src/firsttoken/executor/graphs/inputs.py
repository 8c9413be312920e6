"""One step's inputs: packed on the host into a place of a pinned ring, which the step's first kernel reads.

The device buffer is one int32 array. For a given `StepShape` its parts lie at fixed offsets, so that a graph captured
for the shape always reads the same memory::

    slots[T] | positions[T] | patches[P, 3] | tiles[NT, 5] | sample rows[R] | sample slots[R] | positions[R]

``patches`` are ``(slot, index, block)``: blocks appended to the tables of rows that are running.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.plan import RowWork, StepPlan
from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.kernels.paged_attention.gpu_config import TILE_WORDS, make_tiles, make_tiles_of_one
from firsttoken.kernels.step_io import begin_step
from firsttoken.models.step_view import StepView

PATCH_WORDS = 3
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


class _Prepared:
    """A shape's layout, and its part of each place of the ring, so that a step makes no views: ``words`` for NumPy and,
    for what is written from lists, which costs half as much there, ``ints``."""

    __slots__ = ("ints", "layout", "words")

    def __init__(self, shape: StepShape, ring: Tensor) -> None:
        self.layout = StepLayout(shape)
        self.words: list[NDArray[np.int32]] = [place[: self.layout.words].numpy() for place in ring]
        self.ints = [words.data for words in self.words]


def _decodes(work: list[RowWork], shape: StepShape) -> int:
    """How many of a plan's rows are decode rows: those of one token, but that without decode rows in the shape it is a
    chunk like others."""
    if shape.decode_only:
        return len(work)
    return sum(row.count == 1 and row.sample for row in work) if shape.decode_rows else 0


def first_rows(work: list[RowWork], shape: StepShape) -> list[int]:
    """Where the token rows of each work item begin, as `StepInputs.pack` lays them out."""
    decodes = _decodes(work, shape)
    ends = accumulate((row.count for row in work[decodes:]), initial=shape.decode_rows)
    return [*range(decodes), *ends][: len(work)]


class StepInputs:
    """The device buffer and the pinned ``ring`` before it, int32 ``[places, words]``."""

    def __init__(self, table: ShapeTable, ring: Tensor, device: torch.device) -> None:
        self._table = table
        self._ring = ring
        self._buffer = torch.zeros(ring.shape[1], dtype=torch.int32, device=device)
        self._prepared: dict[StepShape, _Prepared] = {}
        # Of each place, when nothing but so many decode rows of a shape differs from its template.
        self._held: list[tuple[_Prepared, int] | None] = [None] * ring.shape[0]

    def layout(self, shape: StepShape) -> StepLayout:
        return self._of(shape).layout

    def _of(self, shape: StepShape) -> _Prepared:
        prepared = self._prepared.get(shape)
        if prepared is None:
            if len(self._prepared) == MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            prepared = self._prepared[shape] = _Prepared(shape, self._ring)
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

    def receive(self, view: StepView, shape: StepShape, state: Tensor) -> None:
        """Launch what brings the inputs from the place whose turn it is to ``view``, and applies its patches."""
        begin_step(self._buffer[: self.layout(shape).words], self._ring, state, view.patches, view.block_tables)

    def pad(self, shape: StepShape, index: int) -> None:
        """Inputs of a step in which every row is padding: what a graph is warmed up with."""
        prepared = self._of(shape)
        prepared.words[index][:] = prepared.layout.template
        self._held[index] = None

    def pack(self, plan: StepPlan, shape: StepShape, patches: list[tuple[int, int, int]], index: int) -> None:
        """Write a plan's inputs to a place of the ring. ``patches`` must fit."""
        prepared = self._of(shape)
        layout, words, work = prepared.layout, prepared.words[index], plan.work
        decodes = _decodes(work, shape)
        alike = (prepared, decodes)
        if self._held[index] != alike:
            words[:] = layout.template
        self._held[index] = alike if shape.decode_only and not patches else None
        if patches:
            words[layout.patches : layout.patches + PATCH_WORDS * len(patches)] = np.array(patches).ravel()
        self._pack_decodes(prepared.ints[index], layout, work[:decodes])
        if not shape.decode_only:
            words[layout.sample_rows : layout.sample_rows + decodes] = np.arange(decodes)
            if len(work) == decodes + 1:
                self._pack_chunk(words, layout, work[decodes], decodes)
            else:
                self._pack_chunks(words, layout, work[decodes:], decodes)

    def _pack_decodes(self, ints: memoryview, layout: StepLayout, rows: list[RowWork]) -> None:
        count = len(rows)
        slots = array("i", [row.slot for row in rows])
        ints[layout.slots : layout.slots + count] = slots
        ints[layout.positions : layout.positions + count] = array("i", [row.start for row in rows])
        ints[layout.sample_slots : layout.sample_slots + count] = slots
        ints[layout.sample_positions : layout.sample_positions + count] = array("i", [row.start + 1 for row in rows])

    def _pack_chunk(self, words: NDArray[np.int32], layout: StepLayout, row: RowWork, sampled: int) -> None:
        """As `_pack_chunks`, for one: a prompt alone, or the only one beside decode rows."""
        at, end = layout.shape.decode_rows, row.start + row.count
        words[layout.slots + at : layout.slots + at + row.count] = row.slot
        words[layout.positions + at : layout.positions + at + row.count] = np.arange(row.start, end, dtype=np.int32)
        tiles = make_tiles_of_one(row.start, row.count, row.slot, at, self._table.tile_rows)
        words[layout.tiles : layout.tiles + tiles.size] = tiles.ravel()
        if row.sample:
            words[layout.sample_rows + sampled] = at + row.count - 1
            words[layout.sample_slots + sampled] = row.slot
            words[layout.sample_positions + sampled] = end

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
