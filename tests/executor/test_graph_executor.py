"""The executor with graphs against the CPU's float32 model: on a GPU as it is, without one through the interpreter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowBlocks, RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.executor import GREEDY, RANDOM, GraphExecutor
from firsttoken.models import load_model
from firsttoken.models.step_view import Kept, Logits, StepView
from firsttoken.models.tensors import expected_tensors
from tests.support import graph_device
from tests.support.tiny_models import Runner, make_checkpoint, make_config

# Of the logits' norm. bfloat16 keeps 8 bits and each layer rounds about ten times; measured: 0.8 to 3.9 %, median 1.8.
TOLERANCE = 0.06
SLOTS = 6
LENGTH = 96
LIKELIEST = SamplingParams(temperature=0, max_tokens=50)


def make_weights(architecture: str, **changes: object) -> Checkpoint:
    """Weights that bfloat16 holds exactly, so that both models have the same."""
    config = make_config(architecture, **{"hidden_size": 64, "head_dim": 16, "num_layers": 2, **changes})
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name else 0.0)).bfloat16().float()
        for name, shape in expected_tensors(config).items()
    }
    return make_checkpoint(config, tensors)


def make_executor(
    checkpoint: Checkpoint, *, deterministic: bool = False, quantization: str = "none", step_tokens: int = 64
) -> GraphExecutor:
    config = checkpoint.config
    kv = KVFormat(dtype="bfloat16", layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return graph_device.make_executor(
        ExecutorConfig(
            device="graphs",
            dtype="bfloat16",
            quantization=quantization,
            kv_format=kv,
            kv_blocks=64,
            max_num_seqs=SLOTS,
            max_model_len=LENGTH,
            max_step_tokens=step_tokens,
            threads=1,
            adaptive_threads=False,
            deterministic=deterministic,
        ),
        checkpoint,
    )


@dataclass
class Row:
    slot: int
    tokens: list[int]
    blocks: list[int]


class Driver:
    """Plans steps by hand, and keeps the logits of the last one."""

    def __init__(self, executor: GraphExecutor) -> None:
        self.executor = executor
        self.logits: Tensor | None = None
        self.steps = 0
        self.captured: list[bool] = []
        self._free = list(range(1, 64))
        forward = executor._model.forward

        def recorded(step: StepView, kept: Kept | None = None) -> Logits | None:
            logits = forward(step, kept)
            self.logits = None if logits is None else logits.values
            return logits

        executor._model.forward = recorded

    def start(self, slot: int, tokens: list[int], params: SamplingParams = LIKELIEST) -> tuple[Row, RowStart]:
        blocks = [self._free.pop(0) for _ in range(-(-len(tokens) // 16))]
        raw = np.array(tokens, dtype="<u4").tobytes()
        return Row(slot, list(tokens), blocks), RowStart(slot, slot, raw, len(tokens), params, 7, list(blocks))

    def grow(self, row: Row, position: int) -> list[RowBlocks]:
        if position < 16 * len(row.blocks):
            return []
        row.blocks.append(self._free.pop(0))
        return [RowBlocks(row.slot, [row.blocks[-1]])]

    def submit(self, work, starts=(), blocks=()):
        self.steps += 1
        return self.executor.submit(StepPlan(self.steps, list(work), list(starts), list(blocks)))

    def step(self, work, starts=(), blocks=()) -> list[int]:
        result = self.submit(work, starts, blocks).result()
        self.captured.append(result.captured)
        assert all(sample.error is None for sample in result.samples)
        return [sample.token for sample in result.samples]

    def decode(self, rows: list[Row]) -> list[int]:
        """One step of all rows; their new tokens are appended."""
        blocks = [b for row in rows for b in self.grow(row, len(row.tokens) - 1)]
        tokens = self.step([RowWork(row.slot, len(row.tokens) - 1, 1, True) for row in rows], blocks=blocks)
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
        return tokens


class Reference:
    """The same weights in float32 on the CPU."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model = load_model(checkpoint, device="cpu", dtype="float32", quantization="none")

    def after(self, tokens: list[int]) -> Tensor:
        return Runner(self._model).whole(tokens)[-1]


def close(values: Tensor, expected: Tensor) -> bool:
    error = float((values.float().cpu() - expected).norm() / expected.norm())
    return error < TOLERANCE


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


FAMILIES = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True, "output_bias": True}),
    ("Qwen2ForCausalLM", {"num_heads": 4, "num_kv_heads": 4}),
    ("Qwen3ForCausalLM", {"num_heads": 8, "num_kv_heads": 1, "hidden_size": 72, "intermediate_size": 90}),
]


@pytest.mark.parametrize(("architecture", "changes"), FAMILIES)
def test_prefill_and_decode_give_the_references_logits(architecture, changes):
    checkpoint = make_weights(architecture, **changes)
    driver, reference = Driver(make_executor(checkpoint)), Reference(checkpoint)
    row, start = driver.start(2, prompt(45, 1))
    [token] = driver.step([RowWork(2, 0, 45, True)], [start])
    assert close(driver.logits[0], reference.after(row.tokens))
    row.tokens.append(token)
    for _ in range(5):  # over a block's edge
        driver.decode([row])
        assert close(driver.logits[0], reference.after(row.tokens[:-1]))


def test_chunks_beside_decoding_rows_give_the_references_logits():
    checkpoint = make_weights("LlamaForCausalLM")
    driver, reference = Driver(make_executor(checkpoint)), Reference(checkpoint)
    first, start_first = driver.start(0, prompt(15, 1))
    second, start_second = driver.start(4, prompt(33, 2))
    tokens = driver.step([RowWork(0, 0, 15, True), RowWork(4, 0, 33, True)], [start_first, start_second])
    for row, token in zip((first, second), tokens, strict=True):
        row.tokens.append(token)
    long, start_long = driver.start(1, prompt(60, 3))
    for begin, count in ((0, 7), (7, 30), (37, 23)):
        rows = [first, second]
        blocks = [b for row in rows for b in driver.grow(row, len(row.tokens) - 1)]
        work = [RowWork(row.slot, len(row.tokens) - 1, 1, True) for row in rows]
        work.append(RowWork(1, begin, count, begin + count == 60))
        tokens = driver.step(work, [start_long] if not begin else [], blocks)
        for index, row in enumerate(rows):
            assert close(driver.logits[index], reference.after(row.tokens))
            row.tokens.append(tokens[index])
    assert len(tokens) == 3
    assert close(driver.logits[2], reference.after(long.tokens))


def test_a_chunk_that_does_not_sample_has_no_result():
    checkpoint = make_weights("LlamaForCausalLM")
    driver = Driver(make_executor(checkpoint))
    _, start = driver.start(0, prompt(30, 1))
    assert driver.step([RowWork(0, 0, 20, False)], [start]) == []


def test_a_row_computes_the_same_in_any_company():
    """Rows of different lengths together, up to a whole profile, against each alone."""
    checkpoint = make_weights("LlamaForCausalLM")
    driver, reference = Driver(make_executor(checkpoint)), Reference(checkpoint)
    rows, starts = zip(*(driver.start(slot, prompt(9 + 5 * slot, slot)) for slot in range(SLOTS)), strict=True)
    for row, start in zip(rows, starts, strict=True):
        row.tokens += driver.step([RowWork(row.slot, 0, len(row.tokens), True)], [start])
    for number in (1, 3, SLOTS):
        driver.decode(list(rows[:number]))
        for index in range(number):
            assert close(driver.logits[index], reference.after(rows[index].tokens[:-1]))


def test_a_step_may_be_submitted_before_the_one_before_it_is_read():
    """The token that a step chooses is read on the device by the next one."""
    checkpoint = make_weights("Qwen3ForCausalLM")
    alone, ahead = Driver(make_executor(checkpoint)), Driver(make_executor(checkpoint))
    row, start = alone.start(0, prompt(11, 5))
    row.tokens += alone.step([RowWork(0, 0, 11, True)], [start])
    for _ in range(8):
        alone.decode([row])
    other, start = ahead.start(0, prompt(11, 5))
    flying = [ahead.submit([RowWork(0, 0, 11, True)], [start])]
    flying += [
        ahead.submit([RowWork(0, position, 1, True)], blocks=ahead.grow(other, position)) for position in range(11, 19)
    ]
    assert [step.result().samples[0].token for step in flying] == row.tokens[11:]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_captured_step_is_the_same_step(rows):
    checkpoint = make_weights("LlamaForCausalLM")
    eager, captured = Driver(make_executor(checkpoint)), Driver(make_executor(checkpoint))
    shape = captured.executor.table.shape(rows, [], 0)
    captured.executor.capture(shape, GREEDY)
    assert (shape, GREEDY) in captured.executor._captures
    histories = []
    for driver in (eager, captured):
        batch = []
        for slot in range(rows):
            row, start = driver.start(slot, prompt(7 + slot, slot))
            row.tokens += driver.step([RowWork(slot, 0, len(row.tokens), True)], [start])
            batch.append(row)
        for _ in range(3):
            driver.decode(batch)
        histories.append([row.tokens for row in batch])
    assert histories[0] == histories[1]


def test_a_captured_mixed_step_is_the_same_step():
    checkpoint = make_weights("LlamaForCausalLM")
    eager, captured = Driver(make_executor(checkpoint)), Driver(make_executor(checkpoint))
    captured.executor.capture(captured.executor.table.shape(2, [20], 1), GREEDY)
    histories = []
    for driver in (eager, captured):
        batch = []
        for slot in range(2):
            row, start = driver.start(slot, prompt(7 + slot, slot))
            row.tokens += driver.step([RowWork(slot, 0, len(row.tokens), True)], [start])
            batch.append(row)
        late, start = driver.start(2, prompt(40, 9))
        for begin in (0, 20):
            work = [RowWork(row.slot, len(row.tokens) - 1, 1, True) for row in batch]
            tokens = driver.step([*work, RowWork(2, begin, 20, begin == 20)], [] if begin else [start])
            for row, token in zip([*batch, late], tokens, strict=False):
                row.tokens.append(token)
        driver.decode([*batch, late])
        histories.append([row.tokens for row in (*batch, late)])
    assert captured.captured[2:4] == [True, True]
    assert histories[0] == histories[1]


def test_a_result_names_the_shape_that_it_was_padded_to():
    driver = Driver(make_executor(make_weights("LlamaForCausalLM")))
    row, start = driver.start(0, prompt(7, 0))
    alone = driver.submit([RowWork(0, 0, 7, True)], [start]).result()
    late, start = driver.start(1, prompt(40, 9))
    row.tokens.append(alone.samples[0].token)
    mixed = driver.submit([RowWork(0, 7, 1, True), RowWork(1, 0, 20, False)], [start]).result()
    decoding = driver.submit([RowWork(0, 8, 1, True)]).result()
    table = driver.executor.table
    for result, shape in (
        (alone, table.shape(0, [7], 1)),
        (mixed, table.shape(1, [20], 0)),
        (decoding, table.shape(1, [], 0)),
    ):
        assert result.shape_tokens == shape.tokens
        decodes, chunks = shape.decode_rows, shape.tokens - shape.decode_rows
        assert result.graph == (f"d{decodes}" if decodes else "") + (f"p{chunks}" if chunks else "")
    assert decoding.graph == "d1"
    assert len(late.blocks) == 3


def test_idle_moments_capture_the_smallest_shapes_first_and_end(monkeypatch):
    executor = make_executor(make_weights("LlamaForCausalLM"))
    loaded = []
    monkeypatch.setattr(executor, "_run_padded", loaded.append)
    monkeypatch.setattr(executor._runtime, "capture", lambda segment: lambda: None)
    assert not executor.idle(), "who has just got an answer may come again at once"
    executor._busy_ns = 0
    calls = 1
    while executor.idle():
        calls += 1
    assert calls == 2 * len(loaded), "a call does half of what a graph needs"
    assert all(key in executor._captures for key in loaded)
    decodes, prompts, mixed = (1, 2, 4, 6), (16, 32, 48, 64), (64, 64, 70, 70)
    expected = [(GREEDY, decodes), (RANDOM, prompts), (RANDOM, mixed), (RANDOM, decodes), (None, decodes)]
    assert [(shape.tokens, needs) for shape, needs in loaded] == [(t, needs) for needs, all in expected for t in all]


def test_under_load_a_shape_is_captured_when_it_comes_again(monkeypatch):
    driver = Driver(make_executor(make_weights("LlamaForCausalLM")))
    executor = driver.executor
    captured = []
    monkeypatch.setattr(executor._runtime, "capture", lambda segment: captured.append(1) or segment)
    row, start = driver.start(0, prompt(5, 1))
    row.tokens += driver.step([RowWork(0, 0, 5, True)], [start])
    driver.decode([row])
    assert not captured
    driver.decode([row])
    assert len(captured) == 1
    assert (executor.table.shape(1, [], 0), GREEDY) in executor._captures
    driver.decode([row])
    assert len(captured) == 1
    assert driver.captured == [False, False, True, True]


def test_a_closed_executor_holds_no_memory():
    executor = make_executor(make_weights("LlamaForCausalLM"))
    model = weakref.ref(executor._model)
    executor.close()
    executor.close()
    assert model() is None


def test_a_slot_serves_one_request_after_the_other():
    checkpoint = make_weights("LlamaForCausalLM")
    driver, reference = Driver(make_executor(checkpoint)), Reference(checkpoint)
    for seed in range(3):
        row, start = driver.start(3, prompt(18, seed))
        driver.executor.submit(StepPlan(90 + seed, [RowWork(3, 0, 18, True)], [start], retire=[3])).result()
        assert close(driver.logits[0], reference.after(row.tokens))


def test_deterministic_bits_depend_on_nothing_but_the_request():
    """Alone, in company, in chunks, decoded or computed again as a prompt: the same bits."""
    checkpoint = make_weights("LlamaForCausalLM")
    alone = Driver(make_executor(checkpoint, deterministic=True))
    row, start = alone.start(0, prompt(21, 1))
    row.tokens += alone.step([RowWork(0, 0, 21, True)], [start])
    bits = []
    for _ in range(2):
        alone.decode([row])
        bits.append(alone.logits[0].clone())

    company = Driver(make_executor(checkpoint, deterministic=True))
    others, starts = zip(*(company.start(slot, prompt(9 + 7 * slot, 40 + slot)) for slot in (1, 2)), strict=True)
    mine, start = company.start(4, prompt(21, 1))
    work = [RowWork(other.slot, 0, len(other.tokens), True) for other in others]
    tokens = company.step([*work, RowWork(4, 0, 13, False)], [*starts, start])
    for other, token in zip(others, tokens, strict=True):
        other.tokens.append(token)
    rows = [RowWork(other.slot, len(other.tokens) - 1, 1, True) for other in others]
    *tokens, token = company.step([*rows, RowWork(4, 13, 8, True)])
    for other, chosen in zip((*others, mine), (*tokens, token), strict=True):
        other.tokens.append(chosen)
    for expected in bits:
        company.decode([others[0], mine, others[1]])
        assert torch.equal(company.logits[1], expected)

    again, start = company.start(5, row.tokens[:-1])
    company.step([RowWork(5, 0, len(again.tokens), True)], [start])
    assert torch.equal(company.logits[0], bits[-1])
    assert close(bits[-1], Reference(checkpoint).after(again.tokens))


def test_a_captured_model_alone_leaves_each_steps_own_logits():
    checkpoint = make_weights("LlamaForCausalLM")
    told = SamplingParams(temperature=0, max_tokens=50, logprobs=3)
    prompts, seen = [prompt(5, 1), prompt(5, 2)], []
    driver = Driver(make_executor(checkpoint))
    for number in range(4):
        _, start = driver.start(0, prompts[number % 2], told)
        plan = StepPlan(number, [RowWork(0, 0, 5, True)], [start], [], [0] if number else [])
        result = driver.executor.submit(plan).result()
        [sample] = result.samples
        assert sample.logprobs is not None
        assert sample.token == sample.logprobs.top_ids[0]
        seen.append(sample.token)
        driver.captured.append(result.captured)
    assert driver.captured[-1], "the last ones were captured"
    assert seen == seen[:2] * 2
    assert seen[0] != seen[1]
