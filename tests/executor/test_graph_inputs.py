"""Shapes, inputs and rows of the executor with graphs: what the device is told about a step."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from firsttoken.core.plan import RowBlocks, RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.executor.graphs.inputs import StepInputs, StepLayout
from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.executor.graphs.rows import Staging, StreamRows
from firsttoken.kernels.step_io import PLACE, new_state

CPU = torch.device("cpu")


def test_a_shape_has_room_for_the_step_it_is_of():
    table = ShapeTable(max_num_seqs=40, max_step_tokens=1000, tile_rows=64)
    for decodes, chunks, sampling in ((1, [], 0), (17, [], 0), (0, [1], 0), (3, [5, 600, 64], 2), (39, [960], 1)):
        shape = table.shape(decodes, chunks, sampling)
        assert shape.decode_rows >= decodes
        assert shape.tokens - shape.decode_rows >= sum(chunks)
        assert shape.tiles >= sum(-(-count // 64) for count in chunks)
        assert shape.samples >= decodes + sampling
        assert StepLayout(shape).words <= StepLayout(table.largest()).words
    assert table.shape(5, [], 0) == StepShape(8, 8, 0, 8)
    assert table.shape(0, [100], 0).samples == 0


def test_beside_decode_rows_a_few_chunks_more_or_less_are_the_same_shape():
    table = ShapeTable(max_num_seqs=64, max_step_tokens=2048, tile_rows=64)
    shapes = {table.shape(40, [100] * chunks + [500 - 100 * chunks], chunks) for chunks in range(5)}
    assert len(shapes) == 1
    assert shapes <= set(table.mixed_shapes(1024)), "it is captured before anybody needs it"


def _pack(plan: StepPlan, patches=(), tile_rows: int = 4):
    table = ShapeTable(max_num_seqs=8, max_step_tokens=64, tile_rows=tile_rows)
    ring = torch.full((2, StepLayout(table.largest()).words), 99, dtype=torch.int32)
    inputs = StepInputs(table, ring, CPU)
    decodes = [row for row in plan.work if row.count == 1 and row.sample]
    chunks = [row for row in plan.work if row not in decodes]
    shape = table.shape(len(decodes), [row.count for row in chunks], sum(row.sample for row in chunks))
    inputs.pack(plan, shape, list(patches), 1)
    rows, tables = torch.zeros(8, 100, dtype=torch.int32), torch.zeros(8, 7, dtype=torch.int32)
    view = inputs.view(shape, rows, tables, pdl=False)
    state = new_state(CPU)
    state[PLACE] = 1
    inputs.receive(view, shape, state)
    return view


def test_decode_rows_come_with_slots_positions_and_padding():
    plan = StepPlan(step_id=0, work=[RowWork(5, 17, 1, True), RowWork(2, 0, 1, True), RowWork(7, 63, 1, True)])
    view = _pack(plan, [(5, 1, 40)])
    assert view.slots.tolist() == [5, 2, 7, 0]
    assert view.positions.tolist() == [17, 0, 63, -1]
    assert view.patches.tolist()[:2] == [[5, 1, 40], [-1, -1, -1]]
    assert view.block_tables.nonzero().tolist() == [[5, 1]]
    assert int(view.block_tables[5, 1]) == 40
    assert view.sample_rows.tolist()[:3] == [0, 1, 2]
    assert view.sample_slots.tolist() == [5, 2, 7, -1]
    assert view.sample_positions.tolist()[:3] == [18, 1, 64]
    assert view.identity


def test_chunks_come_as_token_rows_and_tiles():
    work = [RowWork(1, 9, 1, True), RowWork(3, 4, 6, True), RowWork(0, 20, 5, False)]
    view = _pack(StepPlan(step_id=0, work=work))
    first = view.decode_rows
    assert view.slots.tolist()[first : first + 11] == [3] * 6 + [0] * 5
    assert view.positions.tolist()[first : first + 12] == [4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, -1]
    assert sorted(map(tuple, view.tiles.tolist())) == sorted(
        [
            (3, first, 4, 4, 4),
            (3, first + 4, 8, 2, 4),
            (0, first + 6, 20, 4, 20),
            (0, first + 10, 24, 1, 20),
            *[(0, 0, 0, 0, 0)] * (len(view.tiles) - 4),
        ]
    )
    assert view.sample_rows.tolist()[:2] == [0, first + 5]
    assert view.sample_slots.tolist()[:2] == [1, 3]
    assert view.sample_positions.tolist()[:2] == [10, 10]
    assert not view.identity


def test_padded_inputs_name_no_row():
    table = ShapeTable(max_num_seqs=4, max_step_tokens=32, tile_rows=16)
    ring = torch.full((1, StepLayout(table.largest()).words), 99, dtype=torch.int32)
    inputs = StepInputs(table, ring, CPU)
    shape = table.shape(3, [20], 1)
    inputs.pad(shape, 0)
    view = inputs.view(shape, ring, ring, pdl=False)
    inputs.receive(view, shape, new_state(CPU))
    assert set(view.positions.tolist()) == set(view.sample_slots.tolist()) == {-1}
    assert set(view.tiles[:, 3].tolist()) == {0}


def test_rows_start_grow_and_start_again():
    state = torch.zeros(2, 4, dtype=torch.int32)
    rows = StreamRows(max_tokens=64, block_tokens=16, state=state)
    staging = Staging(torch.zeros(20, dtype=torch.int32))

    def start(*requests):
        """Of slots, tokens and blocks; a slot's state is twice its number."""
        starts = [
            RowStart(slot, 7, np.array(tokens, dtype="<u4").tobytes(), 1, SamplingParams(), 0, blocks)
            for slot, tokens, blocks in requests
        ]
        rows.start(starts, [np.full(2, 2.0 * slot) for slot, _, _ in requests], staging)

    start((1, [4, 5, 6], [9]))
    assert rows.tokens[1, :4].tolist() == [4, 5, 6, 0]
    assert state.view(torch.float64).tolist() == [[0, 0], [2, 2]]
    patches = rows.patches([RowBlocks(1, [3, 8])])
    assert patches == [(1, 1, 3), (1, 2, 8)]
    rows.append(patches, staging)
    assert rows.block_tables[1, :3].tolist() == [9, 3, 8]
    start((1, list(range(20)), [1, 2]), (0, [2**32 - 1], [7]))  # more than the staging area holds
    assert rows.tokens[:, :20].tolist() == [[-1] + [0] * 19, list(range(20))]
    assert rows.block_tables[:, :2].tolist() == [[7, 0], [1, 2]]
    assert rows.patches([RowBlocks(1, [5])]) == [(1, 2, 5)]


def test_what_does_not_fit_into_the_staging_area_is_kept_until_the_step_is_done():
    """The device reads it later, and nobody else knows of that."""
    staging = Staging(torch.zeros(8, dtype=torch.int32))
    assert [staging.take(words).at for words in (3, 5)] == [0, 3]
    fresh = weakref.ref(staging.take(1).pinned)
    assert fresh() is not None
    staging.reset()
    assert fresh() is None
    assert staging.take(8).at == 0
