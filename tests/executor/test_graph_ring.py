"""The executor's own part: places of the ring, graphs, memory. The model computes nothing, so it costs no kernels."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowBlocks, RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.build import warm_up
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs import inputs as inputs_module
from firsttoken.executor.graphs import results as results_module
from firsttoken.executor.graphs import rows as rows_module
from firsttoken.executor.graphs.executor import GREEDY, RANDOM, RING, GraphExecutor
from firsttoken.executor.graphs.inputs import StepInputs, StepLayout
from firsttoken.executor.graphs.profiles import ShapeTable
from firsttoken.executor.graphs.runtime import HostRuntime
from firsttoken.kernels.sample.state import NUM_PROMPT, SEED_HIGH, SEED_LOW
from firsttoken.kernels.step_io import PLACE, new_state, reference
from firsttoken.models.step_view import StepView

TILE = 64


class Model:
    """Has no logits, so nothing is sampled: it leaves each sample's position in ``tokens``, when that is given, as
    what was chosen. `forward` may be told to fail."""

    vocab_size, nbytes, tile_rows = 100, 0, TILE

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.steps = 0
        self.tokens: torch.Tensor | None = None

    def forward(self, step: StepView, kept: object = None) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.steps += 1
        if self.tokens is not None:
            self.tokens[: len(step.sample_positions)] = step.sample_positions

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is kept here")


class Event:
    def __init__(self) -> None:
        self.pending = False

    def record(self) -> None:
        self.pending = True

    def query(self) -> bool:
        return not self.pending

    def synchronize(self) -> None:
        self.pending = False


class Runtime(HostRuntime):
    """Events pass when they are waited for, and captures may be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Exception] = []
        self.released = 0
        self.broken = False
        self.streams = 0
        self.entered = 0

    def event(self) -> Event:
        return Event()

    def capture(self, segment: Callable[[], object]) -> Callable[[], None]:
        if self.failures:
            raise self.failures.pop(0)
        return super().capture(segment)

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("the device has failed")

    def release(self) -> None:
        self.released += 1

    def stream(self) -> AbstractContextManager[object]:
        self.streams += 1
        return super().stream()

    def enter(self) -> None:
        self.entered += 1


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch) -> None:
    monkeypatch.setattr(inputs_module, "begin_step", reference.begin_step)
    monkeypatch.setattr(results_module, "end_step", reference.end_step)
    monkeypatch.setattr(rows_module, "start_rows", reference.start_rows)


@pytest.fixture
def make() -> Callable[..., tuple[GraphExecutor, Model, Runtime]]:
    def executor(**changes: int) -> tuple[GraphExecutor, Model, Runtime]:
        model, runtime = Model(), Runtime()
        sizes = {"max_num_seqs": 4, "max_model_len": 64, "max_step_tokens": 64, **changes}
        config = ExecutorConfig(
            device="graphs",
            dtype="bfloat16",
            quantization="none",
            kv_format=KVFormat(dtype="bfloat16", layers=1, kv_heads=1, head_dim=16),
            kv_blocks=16,
            threads=1,
            adaptive_threads=False,
            **sizes,
        )
        return GraphExecutor(config, model, runtime), model, runtime

    return executor


@pytest.fixture
def made(make) -> tuple[GraphExecutor, Model, Runtime]:
    return make()


def decode(step: int, slots: int = 1) -> StepPlan:
    return StepPlan(step, [RowWork(slot, step, 1, True) for slot in range(slots)])


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")


def idle(executor: GraphExecutor) -> bool:
    executor._busy_ns = 0
    return executor.idle()


def test_a_place_is_used_again_when_its_padded_step_has_ended(made):
    executor, _, _ = made
    key = executor.table.shape(1, [], 0), GREEDY
    for _ in range(RING):
        executor._run_padded(key)
    oldest = executor._places[0].end
    assert not oldest.query()
    assert executor._take_place() == 0
    assert oldest.query(), "its inputs may not have been copied yet"


def test_more_steps_than_places_wait_for_the_oldest_and_keep_their_results(made):
    executor, _, _ = made
    flying = [executor.submit(decode(step)) for step in range(3 * RING)]
    assert [step.done() for step in flying] == [True] * 2 * RING + [False] * RING
    assert [step.result().step_id for step in flying] == list(range(3 * RING))


def test_a_captured_step_changes_neither_stream_nor_mode(made):
    """Each change costs as much as the launch; the thread has entered the stream, and a graph needs no mode."""
    executor, _, runtime = made
    executor.capture(executor.table.shape(1, [], 0), GREEDY)
    before, entered = runtime.streams, runtime.entered
    assert executor.submit(decode(1)).result().captured
    assert (runtime.streams, runtime.entered) == (before, entered + 1)
    executor.submit(decode(2, slots=3)).result()
    assert runtime.streams > before


def test_starts_are_one_launch_and_change_neither_stream_nor_mode(made, monkeypatch):
    """What edits and log-probabilities need of torch's own work does; so do others' starts beside them."""
    executor, _, runtime = made
    executor.capture(executor.table.shape(0, [5, 7], 2), RANDOM)
    launches = []

    def launch(*args: object) -> None:
        launches.append(args)
        reference.start_rows(*args)

    monkeypatch.setattr(rows_module, "start_rows", launch)

    def submit(step: int, **sampling: object) -> None:
        """One request is new, the other comes again after preemption with two tokens more than its prompt."""
        raw = [np.arange(1, 1 + count, dtype="<u4").tobytes() for count in (5, 7)]
        starts = [
            RowStart(2, 1, raw[0], 5, SamplingParams(temperature=0), 0, [4]),
            RowStart(1, 2, raw[1], 5, SamplingParams(**sampling), 2**40 + 3, [5]),
        ]
        work = [RowWork(2, 0, 5, True), RowWork(1, 0, 7, True)]
        executor.submit(StepPlan(step, work, starts, retire=[1, 2])).result()

    before = runtime.streams
    submit(0, temperature=0.5)
    assert (len(launches), runtime.streams) == (1, before)
    rows, state = executor._rows, executor._sampler.words.view(torch.float64)
    assert rows.tokens[1:3, :8].tolist() == [[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert rows.block_tables[1:3, 0].tolist() == [5, 4]
    assert state[1, [SEED_LOW, SEED_HIGH, NUM_PROMPT]].tolist() == [3, 2**8, 5]
    submit(1, logit_bias={7: 1.0})
    assert (len(launches), runtime.streams) == (2, before + 2), "the lists, and a step that has no graph"


def test_every_step_reads_its_own_inputs_and_leaves_its_own_result(make):
    """Round the ring several times: captured or not, whole steps or the model alone, padded ones between them."""
    executor, model, _ = make(max_model_len=1024)
    model.tokens = executor._results.outputs.tokens
    one, two = executor.table.shape(1, [], 0), executor.table.shape(2, [], 0)
    executor.capture(one, GREEDY)
    executor.capture(two, None)
    chance, flying = random.Random(5), []
    for step in range(5 * RING):
        if chance.random() < 0.2:
            executor._run_padded((executor.table.shape(0, [20], 1), chance.choice([GREEDY, None])))
        rows = chance.randint(1, 4)
        plan = StepPlan(step, [RowWork(slot, 10 * step + slot, 1, True) for slot in range(rows)])
        flying.append((plan, executor.submit(plan)))
        while len(flying) > chance.randint(0, RING - 1):
            plan, handle = flying.pop(0)
            assert [sample.token for sample in handle.result().samples] == [row.start + 1 for row in plan.work]
    for plan, handle in flying:
        assert [sample.token for sample in handle.result().samples] == [row.start + 1 for row in plan.work]


def test_what_could_not_be_launched_takes_no_place(made):
    """Host and device agree on whose turn it is, whatever went wrong between a step's first kernel and its last."""
    executor, model, _ = made
    model.tokens = executor._results.outputs.tokens
    for number, fail in enumerate((lambda: idle(executor), lambda: executor.submit(decode(1))) * 3):
        model.failures = [RuntimeError("no such kernel")]
        with contextlib.suppress(RuntimeError):
            fail()
        assert not model.failures
        place = executor._places[executor._next].end
        assert not place.query(), "its first kernel may be reading it"
        plan = decode(20 + number)
        assert executor.submit(plan).result().samples[0].token == plan.work[0].start + 1
        assert executor._next == int(executor._state[PLACE]) == number + 1


def test_a_step_can_be_read_after_its_executor_was_closed(made):
    executor, _, _ = made
    flying = [executor.submit(decode(step)) for step in range(3)]
    executor.close()
    assert [step.result().step_id for step in flying] == [0, 1, 2]


def test_a_capture_without_memory_is_tried_again_with_what_can_be_released(made):
    executor, _, runtime = made
    key = executor._next_capture()
    idle(executor)
    runtime.failures = [out_of_memory()]
    idle(executor)
    assert key in executor._captures
    assert runtime.released == 1


def test_without_memory_for_captures_steps_run_by_kernels(made, caplog):
    executor, model, runtime = made
    idle(executor)
    runtime.failures = [out_of_memory(), out_of_memory()]
    assert not idle(executor), "there is nothing more to capture"
    assert "no memory is left for more than 0 captured steps" in caplog.text
    before = model.steps
    for step in range(4):
        executor.submit(decode(step)).result()
    assert model.steps == before + 4
    assert not len(executor._captures)
    assert not idle(executor)


def test_under_load_too(made):
    executor, model, runtime = made
    executor.submit(decode(0)).result()
    runtime.failures = [out_of_memory(), out_of_memory()]
    for step in (1, 2):
        executor.submit(decode(step)).result()
    assert model.steps == 3
    assert not len(executor._captures)


def test_what_cannot_be_captured_is_left_out_and_the_others_are_not(made, caplog):
    executor, model, _ = made
    refused = executor._next_capture()
    model.failures = [RuntimeError("out of resources")]
    while idle(executor):
        pass
    assert "out of resources" in caplog.text
    assert refused not in executor._captures
    assert len(executor._captures) > 4
    for step in range(3):
        executor.submit(decode(step)).result()
    assert refused not in executor._captures


def test_a_failed_device_is_not_taken_for_a_kernel_that_fails(made):
    executor, model, runtime = made
    model.failures, runtime.broken = [RuntimeError("illegal address")], True
    with pytest.raises(RuntimeError, match="the device has failed"):
        idle(executor)


def test_a_step_without_memory_takes_that_of_the_graphs(made, caplog):
    executor, model, _ = made
    executor.capture(executor.table.shape(1, [], 0), GREEDY)
    model.failures = [out_of_memory()]
    assert executor.submit(decode(5, slots=3)).result().step_id == 5
    assert "1 captured ones are given up" in caplog.text
    assert not len(executor._captures)
    model.failures = [out_of_memory()]
    with pytest.raises(torch.OutOfMemoryError):
        executor.submit(decode(6, slots=3))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (1, 64), (2, 1), (5, 7), (40, 40), (64, 512), (300, 1000)])
def test_any_plan_within_the_limits_fits_its_shape(slots, tokens, deterministic):
    """With every part of the layout guarded by what lies behind it: the padding of others stays as it was."""
    chance = random.Random(slots * 10_000 + tokens)
    table = ShapeTable(slots, tokens + slots if deterministic else max(tokens, slots), TILE)
    ring = torch.zeros((1, StepLayout(table.largest()).words), dtype=torch.int32)
    inputs, tables = StepInputs(table, ring, torch.device("cpu")), torch.zeros((slots, 2), dtype=torch.int32)
    state = new_state(torch.device("cpu"))
    for _ in range(60):
        plan = random_plan(chance, slots, tokens)
        decodes = 0 if deterministic else sum(row.count == 1 and row.sample for row in plan.work)
        chunks = plan.work[decodes:]
        shape = table.shape(decodes, [row.count for row in chunks], sum(row.sample for row in chunks))
        room = inputs.layout(shape).num_patches
        patches = [(row.slot, 1, 2) for row in plan.work[:decodes]] if chance.random() < 0.3 else []
        assert len(patches) <= room
        if chance.random() < 0.2:
            inputs.pad(chance.choice(table.prompt_shapes(10_000)), 0)
        inputs.pack(plan, shape, patches, 0)
        view = inputs.view(shape, tables, tables, pdl=False)
        inputs.receive(view, shape, state)
        used = sorted((int(s), int(p)) for s, p in zip(view.slots, view.positions, strict=True) if p >= 0)
        assert used == sorted((row.slot, row.start + i) for row in plan.work for i in range(row.count))
        sampled = [(row.slot, row.start + row.count) for row in plan.work if row.sample]
        got = list(zip(view.sample_slots.tolist(), view.sample_positions.tolist(), strict=True))
        assert got == sampled + [(-1, -1)] * (shape.samples - len(sampled))
        last = view.sample_rows[: len(sampled)].long()
        assert view.slots[last].tolist() == [slot for slot, _ in sampled]
        assert view.positions[last].tolist() == [position - 1 for _, position in sampled]
        assert view.patches[:, 0].tolist() == [slot for slot, _, _ in patches] + [-1] * (room - len(patches))
        assert int(view.tiles[:, 3].sum()) == sum(row.count for row in chunks)


def random_plan(chance: random.Random, slots: int, tokens: int) -> StepPlan:
    """As the scheduler makes them: rows of one token that sample, then chunks of at most ``tokens`` in all."""
    order = chance.sample(range(slots), chance.randint(1, slots))
    decodes = chance.choice([0, len(order), chance.randint(0, len(order))])
    work = [RowWork(slot, chance.randint(0, 5000), 1, True) for slot in order[:decodes]]
    left = tokens
    for slot in order[decodes:]:
        if not left:
            break
        count = chance.choice([1, left, chance.randint(1, left), min(left, chance.randint(1, 9))])
        left -= count
        work.append(RowWork(slot, chance.randint(0, 5000), count, count > 1 and chance.random() < 0.5))
    return StepPlan(0, work)


def test_a_slot_retired_in_flight_starts_again_in_order(made):
    executor, _, _ = made
    raw = np.arange(5, dtype="<u4").tobytes()
    start = RowStart(3, 1, raw, 5, SamplingParams(), 0, [4])
    executor.submit(StepPlan(0, [RowWork(3, 0, 5, True)], [start], [RowBlocks(3, [7, 9])]))
    assert executor._rows.block_tables[3, :3].tolist() == [4, 7, 9], "more patches than a shape without decode rows has"
    again = RowStart(3, 2, raw, 5, SamplingParams(temperature=0, logprobs=2), 0, [8])
    with torch.inference_mode():
        executor._results.outputs.ranks.fill_(7)
    flying = executor.submit(StepPlan(1, [RowWork(3, 0, 5, True)], [again], [], [3]))
    executor.submit(StepPlan(2, [RowWork(3, 5, 1, True)], [], [RowBlocks(3, [1])]))
    executor.submit(StepPlan(3, [RowWork(0, 0, 1, True)], retire=[3]))
    [sample] = flying.result().samples
    assert sample.logprobs is not None, "as its own step wanted it"
    assert sample.logprobs.rank == 7
    assert executor._rows.block_tables[3, :2].tolist() == [8, 1]


@pytest.mark.parametrize(("slots", "length", "tokens"), [(1, 1, 1), (1, 2, 1), (1, 17, 1), (3, 17, 5), (64, 64, 512)])
def test_engines_of_any_size_warm_up(make, slots, length, tokens):
    executor, model, _ = make(max_num_seqs=slots, max_model_len=length, max_step_tokens=max(slots, tokens))
    config = SimpleNamespace(executor=executor._config)
    warm_up(executor, config, SimpleNamespace(config=SimpleNamespace(vocab_size=100)))
    assert model.steps == (0 if length == 1 else 3)
    while idle(executor):
        pass
    assert not executor._captures.left
