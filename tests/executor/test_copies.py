"""KV that an executor computed goes to host memory and comes back elsewhere: what follows is the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
import torch

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import Executor
from firsttoken.executor.torch_executor import TorchExecutor
from firsttoken.kvcache.copy import CopyEngine
from firsttoken.kvcache.host import HostMemory
from firsttoken.models.tensors import expected_tensors
from tests.support.graph_device import make_executor
from tests.support.tiny_models import make_checkpoint, make_config

PROMPT = [(7 * i + 3) % 61 for i in range(40)]  # two blocks and a half
OTHER = [(5 * i + 1) % 61 for i in range(40)]
STEPS = 4


def make(kind: str, kv_dtype: str | None = None) -> tuple[Executor, KVFormat]:
    config = make_config("LlamaForCausalLM", hidden_size=64, head_dim=16 if kv_dtype is None else 64, num_layers=2)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name else 0.0)
        for name, shape in expected_tensors(config).items()
    }
    checkpoint = make_checkpoint(config, {name: each.bfloat16().float() for name, each in tensors.items()})
    dtype = "float32" if kind == "torch" else "bfloat16"
    kv = KVFormat(
        dtype=kv_dtype or dtype, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    made = ExecutorConfig(
        device="cpu" if kind == "torch" else "graphs",
        dtype=dtype,
        quantization="none",
        kv_format=kv,
        kv_blocks=16,
        max_num_seqs=2,
        max_model_len=96,
        max_step_tokens=64,
        threads=1,
        adaptive_threads=False,
        deterministic=kind == "deterministic",
    )
    return (TorchExecutor.load if kind == "torch" else make_executor)(made, checkpoint), kv


def start(slot: int, tokens: list[int], blocks: list[int]) -> RowStart:
    greedy = SamplingParams(temperature=0, max_tokens=50)
    known = array("I", tokens).tobytes()
    return RowStart(slot, slot, known, len(PROMPT), greedy, 0, blocks)


def answer(executor: Executor, between: Callable[[list[int]], list[int]] | None = None) -> list[int]:
    """Tokens of a prompt in blocks 1, 2, 3; after the first, ``between`` may have the row go on in other blocks."""
    tokens = list(PROMPT)
    plan = StepPlan(step_id=1, starts=[start(0, tokens, [1, 2, 3])], work=[RowWork(0, 0, len(tokens), True)])
    tokens.append(executor.submit(plan).result().samples[0].token)
    starts = [start(0, tokens, between([1, 2, 3]))] if between else []
    for step in range(STEPS):
        plan = StepPlan(
            step_id=3 + step,
            starts=starts,
            retire=[0] if starts else [],
            work=[RowWork(0, len(tokens) - 1, 1, True)],
        )
        tokens.append(executor.submit(plan).result().samples[0].token)
        starts = []
    return tokens[len(PROMPT) :]


KINDS = [
    ("torch", None),
    ("torch", "int8"),
    ("torch", "int4"),
    ("graphs", "fp8"),
    ("deterministic", "int4"),
]


@pytest.mark.parametrize(
    ("kind", "kv_dtype", "restored"),
    [*((*kind, True) for kind in KINDS), ("torch", None, False)],
)
def test_an_answer_goes_on_from_restored_blocks(kind: str, kv_dtype: str | None, restored: bool) -> None:
    executor, kv = make(kind, kv_dtype)
    alone = answer(executor)
    host = HostMemory(8, kv.bytes_per_block)
    copies: CopyEngine = executor.copies(host)
    host.wait(20)
    with pytest.raises(RuntimeError, match="already"):
        executor.copies()

    def move(blocks: list[int]) -> list[int]:
        out = copies.submit("device", "host", [(block, 7 - block) for block in blocks])
        out.gate_compute()
        # Another prompt takes the blocks; nobody waits for anything.
        plan = StepPlan(step_id=2, starts=[start(1, OTHER, blocks)], work=[RowWork(1, 0, 40, True)], retire=[])
        step = executor.submit(plan)
        if not restored:
            step.result()
            return blocks
        back = copies.submit("host", "device", [(7 - block, 15 - block) for block in blocks], after=[out])
        back.gate_compute()
        return [15 - block for block in blocks]

    moved = answer(executor, move)
    assert (moved == alone) is restored  # on what the other prompt left there, the answer is another
    handle = copies.submit("device", "host", [(0, 0)])
    executor.close()
    assert handle.done()
    host.close()


def test_with_deterministic_a_restored_beginning_leaves_no_trace_whoever_is_beside() -> None:
    """Bits, not only tokens: the prompt's rest is computed in another chunk, from other blocks, beside another row."""
    executor, kv = make("deterministic")
    told = SamplingParams(temperature=0, max_tokens=50, logprobs=3)

    def started(slot: int, tokens: list[int], blocks: list[int]) -> RowStart:
        return RowStart(slot, slot, array("I", tokens).tobytes(), len(PROMPT), told, 0, blocks)

    plan = StepPlan(step_id=1, starts=[started(0, PROMPT, [1, 2, 3])], work=[RowWork(0, 0, 40, True)])
    [alone] = executor.submit(plan).result().samples
    host = HostMemory(8, kv.bytes_per_block)
    copies = executor.copies(host)
    host.wait(20)
    out = copies.submit("device", "host", [(1, 4), (2, 6)])
    out.gate_compute()
    plan = StepPlan(step_id=2, starts=[start(1, OTHER, [1, 2, 3])], work=[RowWork(1, 0, 40, True)], retire=[0])
    executor.submit(plan)
    back = copies.submit("host", "device", [(4, 9), (6, 8)], after=[out])
    back.gate_compute()
    plan = StepPlan(
        step_id=3,
        starts=[started(0, PROMPT, [9, 8, 7]), start(1, OTHER[:20], [1, 2])],
        work=[RowWork(0, 32, 8, True), RowWork(1, 0, 20, True)],
        retire=[1],
    )
    restored = executor.submit(plan).result().samples[0]
    assert alone.logprobs is not None
    assert (restored.token, restored.logprobs) == (alone.token, alone.logprobs)
    executor.close()
    host.close()
