"""One step's inputs: packed on the host into a pinned ring slot, copied to the device in one piece.

The device buffer is one int32 array. For a given `StepShape` its parts lie at fixed offsets, so that a graph captured
for the shape always reads the same memory::

    ring slot | slots[T] | positions[T] | patches[P, 3] | tiles[NT, 4] | sample rows[R] | sample slots[R] | positions[R]

``patches`` are ``(slot, index, block)``: blocks appended to the tables of rows that are running.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.plan import RowWork, StepPlan
from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.kernels.paged_attention.gpu_config import make_tiles
from firsttoken.models.step_view import StepView

HEAD_WORDS = 16  # the ring slot, and room so that all parts start at 64 bytes
PATCH_WORDS = 3
TILE_WORDS = 4


def _align(words: int) -> int:
    return -(-words // 16) * 16


class StepLayout:
    """Where each part of a shape's inputs lies, in words."""

    __slots__ = (
        "patches",
        "positions",
        "sample_positions",
        "sample_rows",
        "sample_slots",
        "shape",
        "slots",
        "tiles",
        "words",
    )

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        t, r = _align(shape.tokens), _align(shape.samples)
        self.slots = HEAD_WORDS
        self.positions = self.slots + t
        self.patches = self.positions + t
        self.tiles = self.patches + _align(PATCH_WORDS * self.num_patches)
        self.sample_rows = self.tiles + _align(TILE_WORDS * shape.tiles)
        self.sample_slots = self.sample_rows + r
        self.sample_positions = self.sample_slots + r
        self.words = self.sample_positions + r

    @property
    def num_patches(self) -> int:
        """A decode row gets at most one block a step; one more lets a shape without decode rows be captured alike."""
        return max(1, self.shape.decode_rows)


class StepInputs:
    """The device buffer and the pinned ring before it. ``slots``: ring slots, one more than steps in flight."""

    def __init__(self, table: ShapeTable, ring: list[Tensor], device: torch.device) -> None:
        self._table = table
        self._ring = [slot.numpy() for slot in ring]
        self._pinned = ring
        self._buffer = torch.zeros(ring[0].shape[0], dtype=torch.int32, device=device)
        self._layouts: dict[StepShape, StepLayout] = {}

    def layout(self, shape: StepShape) -> StepLayout:
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = StepLayout(shape)
        return layout

    def view(self, shape: StepShape, tokens: Tensor, block_tables: Tensor, *, pdl: bool) -> StepView:
        """The device views of a step of this shape."""
        layout, b = self.layout(shape), self._buffer

        def part(begin: int, count: int) -> Tensor:
            return b[begin : begin + count]

        return StepView(
            ring=part(0, 1),
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

    def pad(self, shape: StepShape, ring_slot: int) -> None:
        """Inputs of a step in which every row is padding: what a graph is warmed up and captured with."""
        words = self._fresh(self.layout(shape), ring_slot)
        self._send(ring_slot, words)

    def pack(self, plan: StepPlan, shape: StepShape, patches: list[tuple[int, int, int]], ring_slot: int) -> None:
        """Write a plan's inputs to the ring slot and start the copy to the device. ``patches`` must fit the shape."""
        layout, work = self.layout(shape), plan.work
        words = self._fresh(layout, ring_slot)
        decodes = 0
        while decodes < len(work) and work[decodes].count == 1 and work[decodes].sample:
            decodes += 1
        words[layout.slots : layout.slots + decodes] = [row.slot for row in work[:decodes]]
        words[layout.positions : layout.positions + decodes] = [row.start for row in work[:decodes]]
        if patches:
            words[layout.patches : layout.patches + PATCH_WORDS * len(patches)] = np.array(patches).ravel()
        rows = self._pack_chunks(words, layout, work[decodes:]) if decodes < len(work) else []
        sampled = list(range(decodes)) + [row for row, item in zip(rows, work[decodes:], strict=True) if item.sample]
        sampling = [row for row in work if row.sample]
        self._pack_samples(words, layout, sampled, sampling)
        self._send(ring_slot, words)

    def _fresh(self, layout: StepLayout, ring_slot: int) -> NDArray[np.int32]:
        words = self._ring[ring_slot][: layout.words]
        words[:] = 0
        words[0] = ring_slot
        words[layout.positions : layout.patches] = -1
        words[layout.patches : layout.tiles] = -1
        words[layout.sample_slots : layout.words] = -1
        return words

    def _pack_chunks(self, words: NDArray[np.int32], layout: StepLayout, chunks: list[RowWork]) -> list[int]:
        """Fill token rows and tiles of the chunks; the last token row of each."""
        counts = np.array([row.count for row in chunks], dtype=np.int32)
        starts = np.array([row.start for row in chunks], dtype=np.int32)
        slots = np.array([row.slot for row in chunks], dtype=np.int32)
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
        last: list[int] = (ends - 1 + at).tolist()
        return last

    @staticmethod
    def _pack_samples(words: NDArray[np.int32], layout: StepLayout, rows: list[int], sampling: list[RowWork]) -> None:
        count = len(rows)
        words[layout.sample_rows : layout.sample_rows + count] = rows
        words[layout.sample_slots : layout.sample_slots + count] = [row.slot for row in sampling]
        words[layout.sample_positions : layout.sample_positions + count] = [row.start + row.count for row in sampling]

    def _send(self, ring_slot: int, words: NDArray[np.int32]) -> None:
        self._buffer[: len(words)].copy_(self._pinned[ring_slot][: len(words)], non_blocking=True)
