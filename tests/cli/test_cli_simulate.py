from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.cli import main as cli
from firsttoken.cli import simulate as command
from firsttoken.devices.cuda import POLICY
from firsttoken.scheduler import PromptOrder, TimeBudget
from firsttoken.simulate import policies
from firsttoken.simulate import run as simulate_run

LOAD = ["simulate", "--rate", "20", "--seconds", "1", "--mix", "64,256:4,16"]


def simulated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_result_has_its_public_names(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, *LOAD)
    assert result["policy"] == "default"
    assert result["requests"] == {"sent": 20, "ok": 20, "failed": 0, "reasons": {}, "within_targets": 20}
    figures = result["classes"]["p2"]
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert list(figures[name]) == ["mean", "p50", "p90", "p95", "p99", "max"]
        assert 0 < figures[name]["p50"] <= figures[name]["max"]
    assert figures["goodput"] == pytest.approx(20 / result["virtual_s"])
    assert result["preemptions"] == 0
    assert result["kv"] == {"hit_ratio": 0.0, "evictions": 0}
    assert result["steps"] > 16
    assert set(result["step_time_error"]) == {"decode", "mixed", "prefill"}
    assert result["virtual_s"] > 0.5
    assert result["wall_s"] > 0
    assert (result["device_name"], result["model"]) == ("NVIDIA H200", "random:llama-3.1-8b")
    assert (result["rate"], result["mix"], result["seed"], result["seconds"]) == (20.0, "64,256:4,16", 1, 1.0)


def test_several_policies_make_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output, png = tmp_path / "new" / "result.json", tmp_path / "result.png"
    argv = [*LOAD, "--policy", "default,fcfs-512,prefill-first", "--output", str(output), "--png", str(png)]
    result = simulated(capsys, *argv)
    assert [each["policy"] for each in result["results"]] == ["default", "fcfs-512", "prefill-first"]
    assert "policy" not in result
    assert json.loads(output.read_text(encoding="utf-8")) == result
    assert png.read_bytes().startswith(b"\x89PNG")


def test_people_get_a_table_with_the_models_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LOAD, "--policy", "default,fcfs-512", "--max-model-len", "200"]) == 0
    out = capsys.readouterr().out
    assert "step times are off by (p50/p90) decode" in out
    assert "\ndefault  " in out
    assert "\nfcfs-512  " in out
    assert "default: refused " in out
    assert "context_length_exceeded" in out


def test_the_default_policy_is_the_cuda_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    real = simulate_run.simulate

    def spy(jobs: Any, policy: policies.Policy, engine: simulate_run.EngineShape, *rest: Any, **named: Any) -> Any:
        seen.append((policy.budget, policy.order, engine.in_flight))
        return real(jobs, policy, engine, *rest, **named)

    monkeypatch.setattr(simulate_run, "simulate", spy)
    simulated(capsys, *LOAD)
    [(budget, order, in_flight)] = seen
    ours = POLICY.budget(budget.time)
    assert isinstance(ours, TimeBudget)
    assert (budget.stretch, budget.alone) == (ours.stretch, ours.alone)
    assert (order, in_flight) == (PromptOrder(), POLICY.in_flight)


def test_a_faster_load_waits_longer(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (simulated(capsys, *LOAD, "--scale", scale)["classes"]["p2"] for scale in ("0.1", "50"))
    assert fast["ttft_ms"]["p50"] > 1.2 * slow["ttft_ms"]["p50"]


def test_targets_decide_the_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    good = simulated(capsys, *LOAD, "--target-ttft", "10s", "--target-itl", "1s")["classes"]["p2"]["goodput"]
    assert good > 0
    assert simulated(capsys, *LOAD, "--target-ttft", "1us")["classes"]["p2"]["goodput"] == 0


def test_each_class_has_its_figures_and_targets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    targets = tmp_path / "targets.toml"
    targets.write_text('[class.p0]\nttft_p99 = "11us"\nmax_queue = "10us"\n', encoding="utf-8")
    argv = [*LOAD, "--classes", "p0:0.5,p2:0.5", "--targets", str(targets)]
    result = simulated(capsys, *argv)
    assert sorted(result["classes"]) == ["p0", "p2"]
    assert result["classes"]["p0"]["good"] == 0
    assert result["requests"]["within_targets"] == result["classes"]["p2"]["requests"]
    assert result["shares"] == {"p0": 0.5, "p2": 0.5}
    assert result["classes"] == simulated(capsys, *argv)["classes"]


def test_admission_turns_away_what_is_too_much(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    targets = tmp_path / "targets.toml"
    targets.write_text("[class.p2]\nmax_waiting = 1\n", encoding="utf-8")
    argv = ["simulate", "--bursts", "8:1", "--mix", "64:4", "--max-num-seqs", "2", "--targets", str(targets)]
    assert simulated(capsys, *argv)["requests"]["failed"] == 0
    requests = simulated(capsys, *argv, "--admission", "on")["requests"]
    assert requests["reasons"] == {"overloaded: queue of p2": requests["failed"]}
    assert 0 < requests["failed"] < 8


def test_phases_and_bursts_are_a_load(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, "simulate", "--phases", "20:1,40:1", "--bursts", "8:10", "--mix", "64:4")
    assert result["classes"]["p2 bursts"]["requests"] == 8
    assert result["virtual_s"] > 12
    assert (result["phases"], result["bursts"]) == ([[20.0, 1.0], [40.0, 1.0]], [[8, 10.0]])


def test_the_load_on_the_device_is_told_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    on, off = (simulated(capsys, *LOAD, "--sustained", state) for state in ("on", "off"))
    assert on["sustained"]["mixed"] > 1
    assert off["sustained"] == {"decode": 1.0, "mixed": 1.0, "prefill": 1.0, "host_ms": 0.0}
    assert on["classes"]["p2"]["itl_ms"]["p50"] > off["classes"]["p2"]["itl_ms"]["p50"]


def test_a_trace_shares_its_prefixes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * number, "input_length": 1000, "output_length": 3, "hash_ids": [0, number + 1]}
        for number in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = simulated(capsys, "simulate", "--trace", str(trace))
    assert result["kv"]["hit_ratio"] == 3 * 512 / 4000
    assert (result["trace"], result["rate"], result["mix"]) == ("trace.jsonl", None, None)
    result = simulated(capsys, "simulate", "--trace", str(trace), "--seconds", "1.5", "--kv-blocks", "70")
    assert result["requests"]["sent"] == 2
    assert result["kv_blocks"] == 70


def test_measured_steps_of_another_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = [
        {"decode_rows": rows, "context": 64, "prefill_tokens": tokens, "prefill_start": 0, "ms": 100.0}
        for rows in (0, 1, 8, 64)
        for tokens in (0, 64, 256, 1024, 4096)
        if rows or tokens
    ]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"device_name": "slow", "model": "m", "steps": steps}), encoding="utf-8")
    result = simulated(capsys, *LOAD, "--steps", str(path), "--kv-blocks", "1000")
    assert result["device_name"] == "slow"
    assert result["classes"]["p2"]["itl_ms"]["p50"] == pytest.approx(100, rel=0.05)
    assert cli.main([*LOAD, "--steps", str(path)]) == 2
    assert "give --kv-blocks" in capsys.readouterr().err
    assert cli.main([*LOAD, "--steps", str(path), "--kv-blocks", "9", "--gpu", "h200"]) == 2
    assert "leave out --gpu, --shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "1", "--policy", "default,"], "'' is no policy"),
        (["--rate", "1", "--mix", "64"], "--mix: '64' is not a mix"),
        (["--rate", "0.01"], "no request at all"),
        (["--rate", "1", "--gpu", "tpu"], "come with firsttoken"),
        (["--trace", "x", "--seed", "1"], "a trace has its own lengths"),
        ([], "say which load"),
        (["--rate", "1", "--trace", "x"], "say which load"),
        (["--rate", "1", "--bursts", "1:1"], "say which load"),
        (["--bursts", "1:1", "--seconds", "1"], "leave out --seconds"),
        (["--rate", "1", "--targets", "x", "--target-itl", "1ms"], "leave out --target-ttft"),
    ],
)
def test_bad_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "1", "--classes", "p0"],
        ["--rate", "1", "--classes", "p3:1"],
        ["--rate", "1", "--classes", "p0:0.5,p0:0.5"],
        ["--rate", "1", "--classes", "p0:0.5,p1:0.4"],
        ["--phases", "5"],
        ["--phases", "0:1"],
        ["--bursts", "0:1"],
        ["--rate", "1", "--sustained", "maybe"],
    ],
)
def test_usage_that_the_parser_refuses(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *argv])
    assert ended.value.code == 2


def test_a_missing_trace_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["simulate", "--trace", str(tmp_path / "none")]) == 1
    assert "none: No such file" in capsys.readouterr().err


def test_the_help_names_every_policy() -> None:
    assert all(name in command.EPILOG for name in policies.POLICY_NAMES)
