"""``firsttoken plan``: its figures, its advice, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from firsttoken.bench import footprint
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli.main import main
from firsttoken.cli.plan import _gpu
from firsttoken.core.engine_args import EngineArgs
from firsttoken.engine.memory_plan import GPUMachine, rounded_to_fit
from firsttoken.executor.memory_plan.cpu import Footprint
from firsttoken.models.load import load_model

KEYS = {
    "weights_mib",
    "kv_mib",
    "graphs_mib",
    "activations_mib",
    "total_mib",
    "capacity_mib",
    "fits",
    "max_users",
    "shard_tokens",
    "advice",
}


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_one_object_says_it_all(capsys):
    code, said = _json(capsys, "random:llama-3.1-8b", "--gpu", "h200", "--context", "8192", "--users", "16")
    assert code == 0
    assert said.keys() >= KEYS
    # 16 requests of 1 GiB and a spare block.
    assert said["kv_mib"] == 16 * 1024 + 2
    parts = ("runtime", "weights", "kv", "graphs", "activations")
    assert abs(sum(said[f"{part}_mib"] for part in parts) - said["total_mib"]) <= len(parts)
    assert said["fits"]
    assert "--max-model-len 8192 --max-num-seqs 16 --kv-memory 16386MiB" in said["advice"][0]


def test_what_does_not_fit_ends_with_1_and_says_which_knob_to_turn(capsys):
    words = ("random:llama-3.1-8b", "--context", "32768", "--users", "4")
    code, said = _json(capsys, *words, "--gpu", "24GB")
    assert (code, said["fits"]) == (1, False)
    assert said["capacity_mib"] == 24 * 10**9 >> 20
    assert f"lower --users to {said['max_users']}" in said["advice"]
    assert f"lower --context to {said['max_context']}" in said["advice"]
    assert "with --quantization fp8 --kv-dtype int8 all of it fits" in said["advice"]
    assert _json(capsys, *words, "--gpu", "80GB")[0] == 0


def test_what_is_rounded_to_fit_is_as_little_as_helps_and_not_what_was_said_already() -> None:
    checkpoint, machine = open_checkpoint("random:llama-3.1-8b"), GPUMachine(_gpu("24GB"))

    def rounded(users: int, **given: str) -> tuple[str, str] | None:
        found = rounded_to_fit(EngineArgs(model="m", **given), checkpoint, machine, 8192, users)
        return None if found is None else (found.quantization, found.kv_dtype)

    assert rounded(6) == ("auto", "int8")
    assert rounded(10) == ("fp8", "auto")
    assert rounded(12) == ("fp8", "int8")
    assert rounded(6, kv_dtype="bfloat16") == ("fp8", "bfloat16")
    assert rounded(16, quantization="none") == ("none", "int4")
    assert rounded(99) is None


def test_a_gpu_that_no_engine_runs_on_is_named(capsys):
    code, said = _json(capsys, "random:tiny-llama", "--gpu", "l4", "--context", "128")
    assert (code, said["fits"]) == (1, False)
    assert "no engine runs on NVIDIA L4: it has compute capability 8.9" in said["advice"][0]
    assert not any("firsttoken serve" in line for line in said["advice"])
    assert main(["plan", "random:tiny-llama", "--gpu", "l4", "--context", "128"]) == 1
    assert "on NVIDIA L4: no engine runs there" in capsys.readouterr().out
    assert len(_json(capsys, "random:tiny-llama", "--gpu", "h100", "--context", "128")[1]["advice"]) == 1


def test_people_get_lines(capsys):
    assert main(["plan", "random:llama-3.2-1b", "--gpu", "h100", "--context", "2048"]) == 0
    said = capsys.readouterr().out
    assert "weights" in said
    assert "fits" in said
    assert "-> firsttoken serve random:llama-3.2-1b --max-model-len 2048" in said


@pytest.mark.parametrize("quantization", ["packed", "int8", "int4"])
def test_the_model_that_is_measured_with_loads_in_every_form(quantization: str) -> None:
    model = open_checkpoint(footprint.MODEL)
    load_model(model, device="cpu", dtype="bfloat16", quantization=footprint.measured_as(quantization))


def test_the_cpu_is_measured_first(capsys, monkeypatch):
    asked = []

    def measured(dtype: str, quantization: str, threads: int) -> Footprint:
        asked.append((dtype, quantization))
        return Footprint(engine=300 << 20, length=2 << 20)

    monkeypatch.setattr(footprint, "measure_footprint", measured)
    words = ("random:tiny-llama", "--context", "128", "--quantization", "none", "--dtype", "float32")
    for machine in (["--device", "cpu"], ["--gpu", "cpu"]):
        code, said = _json(capsys, *words, *machine)
        assert code == 0
        assert asked.pop() == ("float32", "none")
    assert said["runtime_mib"] == 300
    assert "--device cpu" in said["advice"][0]
    assert said["advice"][0].endswith("--dtype float32 --quantization none")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "toaster"], "gpu must be cpu, a size as in 24GB, or one of h200, .*, got 'toaster'"),
        (["--gpu", "24"], "gpu 24 is 24 bytes: write 24GB"),
        (["--gpu", "4090"], "gpu 4090 is 4,090 bytes: write rtx-4090 or 4090GB"),
        (["--gpu", "900MB"], "gpu 900MB is 900,000,000 bytes: no GPU"),
        (["--gpu", "h200", "--device", "cpu"], "device 'cpu' contradicts --gpu h200"),
        (["--gpu", "cpu", "--device", "cuda"], "device 'cuda' contradicts --gpu cpu"),
        (["--gpu", "h200", "--device", "gpu"], "invalid choice: 'gpu'"),
        (["--gpu", "h200", "--users", "5000"], "users may be at most 4096"),
        (["--gpu", "h200", "--context", "600"], "max_model_len must be 1 to 512"),
        (["--gpu", "h200", "--quantization", "packed"], "quantization 'packed' is for the CPU"),
        (["--gpu", "h200", "--quantization", "int8"], "quantization 'int8' is for the CPU.*--quantization fp8"),
        (["--gpu", "h200", "--kv-dtype", "float32"], "--kv-dtype 'float32' with dtype 'bfloat16'"),
    ],
)
def test_what_cannot_be_is_refused(words, said, capsys):
    try:
        code = main(["plan", "random:tiny-llama", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert re.search(said, capsys.readouterr().err)


def test_rounded_weights_are_planned_and_named_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("random:llama-3.1-8b", "--gpu", "h200", "--context", "8192", "--users", "16")
    weights = {}
    for quantization in ("none", "fp8", "int4"):
        code, said = _json(capsys, *asked, "--quantization", quantization)
        assert code == 0
        weights[quantization] = said["weights_mib"]
        assert said["advice"][0].endswith(f"--quantization {quantization}")
    # Half and a quarter of the layers, a head of 8 bits beside an embedding of 16, scratch for a matrix.
    assert weights["fp8"] < 0.56 * weights["none"]
    assert weights["int4"] < 0.34 * weights["none"]
