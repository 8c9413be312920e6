"""The grid of steps, and its plans on an executor that checks every one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.step_grid import Cell, Limits, grid
from firsttoken.bench.steps import Engine, StepsConfig, measure_steps
from firsttoken.cli.main import main
from tests.support.scripted import ScriptedExecutor

WIDE = Limits(rows=65, length=16640, step=8256, blocks=40_000, block_tokens=16, growth=8)


def limits(**changes: int) -> Limits:
    return Limits(**{"rows": 4, "length": 600, "step": 64, "blocks": 200, "block_tokens": 16, "growth": 5, **changes})


def test_a_large_device_gets_more_than_200_different_steps() -> None:
    cells = grid(WIDE)
    assert len(cells) == len(set(cells)) > 200
    assert {cell.kind for cell in cells} == {"decode", "prefill", "mixed"}
    assert Cell(64, 8192) in cells
    assert Cell(prefill_tokens=8192) in cells


@pytest.mark.parametrize("small", [limits(), limits(rows=1), limits(step=20), limits(length=200), limits(blocks=20)])
def test_no_cell_exceeds_its_limits(small: Limits) -> None:
    for cell in grid(small):
        assert cell.rows <= small.rows
        assert cell.tokens <= small.step
        assert max(cell.context + small.growth if cell.decode_rows else 0, cell.prefill_end + 1) <= small.length
        assert small.blocks_of(cell) <= small.blocks


def test_blocks_of_a_cell() -> None:
    # 128 + 5 tokens are 9 blocks; the prompt's 48 and the sampled one are 4.
    assert limits().blocks_of(Cell(2, 128, 32, 16)) == 2 * 9 + 4


def test_every_plan_is_one_that_a_scheduler_could_have_made() -> None:
    executor = ScriptedExecutor(lambda request, tokens: 1)
    config = StepsConfig(repeat=2)
    engine = Engine(executor, {}, limits(length=1200, blocks=400, step=200), 100)
    try:
        rows = measure_steps(engine, config)
    finally:
        executor.close()
    assert [row["kind"] for row in rows] == [cell.kind for cell in grid(engine.limits)]
    assert {row["kind"] for row in rows} == {"decode", "prefill", "mixed"}
    filled: set[int] = set()
    live: dict[int, list[int]] = {}
    for plan in executor.plans:
        live = {slot: blocks for slot, blocks in live.items() if slot not in plan.retire}
        live |= {start.slot: start.blocks for start in plan.starts}
        held = [block for work in plan.work for block in live[work.slot]]
        assert len(held) == len(set(held)), "a block is in two rows of a step"
        assert max(held) < engine.limits.blocks
        assert plan.num_tokens <= engine.limits.step
        for work in plan.work:
            # What is read was written: by filling, or by the row itself.
            whole = live[work.slot][: work.start // 16]
            assert filled.issuperset(whole)
            filled |= set(live[work.slot][work.start // 16 : -(-(work.start + work.count) // 16)])
        # Decode rows first.
        counts = [work.count for work in plan.work if work.sample]
        assert counts == sorted(counts)


def test_a_step_that_fails_ends_the_measurement() -> None:
    executor = ScriptedExecutor(lambda request, tokens: 1)
    executor.fail_at = 2
    with pytest.raises(RuntimeError, match="scripted failure"):
        measure_steps(Engine(executor, {}, limits(), 100), StepsConfig(repeat=1))
    executor.close()


def test_nothing_fits() -> None:
    executor = ScriptedExecutor(lambda request, tokens: 1)
    with pytest.raises(BenchFailed, match="no step of the grid fits"):
        measure_steps(Engine(executor, {}, limits(blocks=1), 100), StepsConfig(repeat=1))
    executor.close()


def test_command_on_a_real_executor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "steps.json"
    small = ["--max-rows", "2", "--max-context", "256", "--max-prefill", "64", "--repeat", "1", "--threads", "1"]
    argv = ["bench", "steps", "random:tiny-llama", "--device", "cpu", *small, "--json", "--output", str(file)]
    assert main(argv) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(file.read_text())
    assert {
        "command",
        "date",
        "commit",
        "versions",
        "device",
        "model",
        "dtype",
        "quantization",
        "kv_dtype",
        "seed",
    } <= set(shown)
    kinds = [row["kind"] for row in shown["steps"]]
    assert kinds == sorted(kinds, key=["decode", "prefill", "mixed"].index)
    for row in shown["steps"]:
        assert 0 < row["min_ms"] <= row["ms"] <= row["wall_ms"] + 1e-3
        assert row["tokens"] == row["decode_rows"] + row["prefill_tokens"]
        assert row["decode_rows"] <= 2
        assert row["forward_ms"] + row["sample_ms"] <= row["ms"] + 1e-3


def test_an_interrupt_while_the_model_is_loaded_ends_the_command_and_aborts_nothing() -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
import torch
from firsttoken.cli import main
from firsttoken.executor import torch_executor

def load_model(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        torch.ones(1000) + 1

torch_executor.load_model = load_model
sys.exit(main.main(["bench", "steps", "random:tiny-llama", "--device", "cpu"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")
