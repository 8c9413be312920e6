from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firsttoken.bench.arrivals import Mix
from firsttoken.core.errors import ConfigError
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.scheduler import TimeBudget
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_time import StepLoad
from firsttoken.simulate import gpu as module
from firsttoken.simulate.gpu import Sustained, known_tables, model_gpu, packaged_table, read_table
from firsttoken.simulate.policies import Policy
from firsttoken.simulate.run import EngineShape, simulate
from firsttoken.simulate.workload import poisson_jobs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def steps(count: int = 40, noise: float = 0.0) -> list[dict[str, Any]]:
    rng = random.Random(1)
    rows = []
    for number in range(count):
        rows.append({"decode_rows": 1 + number, "context": 512, "prefill_tokens": 0, "prefill_start": 0, "ms": 4.0})
        rows[-1]["ms"] += noise * rng.random()
    return rows


def table(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({"device_name": "G", "model": "m", "steps": steps(), **fields}), encoding="utf-8")
    return path


def test_the_packaged_h200_is_known_and_its_error_is_small() -> None:
    """The bounds are what the step-time model is held to."""
    assert "h200 llama-3.1-8b" in known_tables()
    gpu = model_gpu(packaged_table("h200", "llama-3.1-8b"))
    assert gpu.table.device_name == "NVIDIA H200"
    assert len(gpu.table.steps) == 386
    assert sorted(gpu.error) == ["decode", "mixed", "prefill"]
    for error in gpu.error.values():
        assert 0 < error["p50"] < 0.08
        assert error["p90"] < 0.2
    # One row with little context: measured as 3.7 ms.
    assert gpu.step_time.ms(StepLoad(1, 129, 0, 0)) == pytest.approx(3.7, rel=0.1)


def test_steps_under_load_are_stretched_by_kind() -> None:
    table = packaged_table("h200", "llama-3.1-8b")
    under_load, alone = model_gpu(table), model_gpu(table, sustained=False)
    assert alone.sustained == Sustained()
    assert table.sustained.source
    for load, factor in (
        (StepLoad(8, 4096, 0, 0), table.sustained.decode),
        (StepLoad(8, 4096, 256, 32896, 256), table.sustained.mixed),
        (StepLoad(0, 0, 256, 32896, 256), table.sustained.prefill),
    ):
        assert under_load.step_time.ms(load) == pytest.approx(factor * alone.step_time.ms(load))
    assert 1 < table.sustained.decode < table.sustained.mixed


def test_a_measured_load_is_reproduced() -> None:
    """What an engine measured on an H200 with the budget of then: 40 requests a second for 12 s, 128 at once."""
    measured = json.loads((RESULTS / "load_8b_40_then.json").read_text(encoding="utf-8"))
    gpu = model_gpu(packaged_table("h200", "llama-3.1-8b"))
    engine = EngineShape(
        kv_blocks=gpu.table.kv_blocks,
        max_num_seqs=128,
        max_model_len=131072,
        in_flight=2,
        host_ms=gpu.sustained.host_ms,
    )
    learner = LearningStepTime(gpu.alone)
    then = TimeBudget(learner, 3.3, 100.0, 5.0, ((0, 8192), (2, 2048)), GRAPH_SIZES)
    jobs = poisson_jobs(40, 12, Mix.parse(measured["mix"]), 1)
    figures = simulate(jobs, Policy("then", then, step_time=learner), engine, gpu.step_time).classes["p2"].result(1)
    for name, key in (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p90"), ("e2e_ms", "p99")):
        assert figures[name][key] == pytest.approx(measured[name][key], rel=0.15)


def test_a_table_that_says_nothing_of_load_is_taken_as_it_is(tmp_path: Path) -> None:
    assert model_gpu(read_table(table(tmp_path / "steps"))).sustained == Sustained()
    with pytest.raises(ConfigError, match="mixed"):
        read_table(table(tmp_path / "steps", sustained={"mixed": 0}))


def test_the_error_is_of_steps_that_the_model_has_not_seen(tmp_path: Path) -> None:
    exact = model_gpu(read_table(table(tmp_path / "exact")))
    noisy = model_gpu(read_table(table(tmp_path / "noisy", steps=steps(noise=4.0))))
    assert exact.error["decode"]["max"] < 0.01
    assert noisy.error["decode"]["p90"] > 0.1
    assert list(exact.error) == ["decode"]


def test_a_quarter_is_held_out_and_the_model_that_runs_has_seen_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    real = module.fit_steps

    def spy(rows: Any) -> Any:
        shown.append({row["decode_rows"] for row in rows})
        return real(rows)

    monkeypatch.setattr(module, "fit_steps", spy)
    model_gpu(read_table(table(tmp_path / "steps")))
    assert [len(rows) for rows in shown] == [30, 40]


def test_an_unknown_pair_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'a100'.* come with firsttoken, only of h200 llama-3.1-8b; measure"):
        packaged_table("a100", "llama-3.1-8b")
    with pytest.raises(ConfigError, match="come with firsttoken"):
        packaged_table("../h200", "llama-3.1-8b")


def test_a_result_of_bench_steps_is_read_as_it_is(tmp_path: Path) -> None:
    rows = [{**row, "kind": "decode", "tokens": 1, "wall_ms": 5.0} for row in steps()]
    found = read_table(table(tmp_path / "steps.json", steps=rows, repeat=5))
    assert (found.device_name, found.model, len(found.steps), found.kv_blocks) == ("G", "m", 40, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no result of 'bench steps'"),
        ("[]", "is no result of 'bench steps'"),
        ({"steps": [{"decode_rows": 1}]}, "is no result of 'bench steps'.*steps"),
        ({"steps": [{**steps(1)[0], "ms": 0}]}, "is no result of 'bench steps'.*ms"),
        ({"steps": [{**steps(1)[0], "context": -1}]}, "is no result of 'bench steps'.*context"),
        ({"steps": [{**steps(1)[0], "decode_rows": 0}] * 20}, "step 0 computes nothing"),
        ({"steps": steps(3)}, "has 3 steps; a model of a device takes 16 or more"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "steps.json"
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        table(path, **content)
    with pytest.raises(ConfigError, match=reason):
        read_table(path)


def test_a_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_table(table(tmp_path / "steps.json"))


def test_the_room_loads_no_torch() -> None:
    code = (
        "import sys, firsttoken.simulate.run, firsttoken.simulate.traces, firsttoken.simulate.gpu\n"
        "import firsttoken.simulate.picture, firsttoken.devices.cuda\n"
        "sys.exit(f'loaded torch' if {'torch', 'triton'} & sys.modules.keys() else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
