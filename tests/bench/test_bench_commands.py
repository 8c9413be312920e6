"""`bench latency` and `bench load`: on a real tiny engine once each, and on a scripted one where it is about faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from firsttoken.bench.arrivals import Mix
from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.latency import LatencyConfig, measure_latency
from firsttoken.bench.load import LoadConfig, measure_load
from firsttoken.bench.session import Session, open_session
from firsttoken.cli.main import main
from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.engine.stub import Fault, StubEngine, echo
from firsttoken.frontend.async_llm import AsyncLLM

HEAD = {"command", "date", "commit", "versions", "device", "model", "dtype", "quantization", "kv_dtype", "seed"}
PERCENTILES = {"mean", "p50", "p90", "p95", "p99", "max"}
TINY = ["random:tiny-llama", "--device", "cpu", "--threads", "1"]

Work = Callable[[Session], Awaitable[dict[str, Any]]]


def test_latency_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ["--batch", "3", "--input", "40", "--output", "6", "--repeat", "2"]
    assert main(["bench", "latency", *TINY, *sizes, "--json", "--output-json", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(file.read_text())
    assert set(result) >= HEAD | {"batch", "input", "output", "start_ms", "roof_share"}
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(result[name]) == PERCENTILES
    assert result["tokens_per_s_median"] == pytest.approx(3 * 6 / (result["e2e_ms"]["p50"] / 1e3))
    assert result["requests_per_s_median"] == pytest.approx(3 / (result["e2e_ms"]["p50"] / 1e3))
    assert 0 < result["host_us_per_step"] < 100_000
    assert result["achieved_gb_s"] == pytest.approx(
        result["read_bytes_per_step"] / result["tpot_ms"]["p50"] * 1e3 / 1e9
    )
    assert result["roof_share"] is None
    assert 0.05 < result["peak_memory_gib"] < 8
    assert sum(result["start_ms"].values()) == pytest.approx(result["start_s"] * 1e3)
    assert {"command", "imports", "weights", "first_token"} <= set(result["start_ms"])
    assert len(result["rounds"]) == 2
    assert result["captured_share"] == 0, "a CPU captures no steps"
    assert {"transport", "queue", "prefill", "decode"} <= set(result["stages_ms"])
    stages = sum(stage["mean"] for stage in result["stages_ms"].values())
    assert 0.7 * result["e2e_ms"]["mean"] < stages < 1.1 * result["e2e_ms"]["mean"]


def test_load_command(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rate", "20", "--seconds", "1", "--warmup", "0", "--mix", "16,40:2,5"]
    assert main(["bench", "load", *TINY, *load, "--target-ttft", "100s", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) >= HEAD | {"rate", "mix", "seconds", "late_ms"}
    assert result["requests"] == {"sent": 20, "ok": 20, "failed": 0, "reasons": {}}
    assert result["requests_per_s"] == result["goodput_rps"] == pytest.approx(20 / result["wall_s"])
    assert result["targets"]["ttft_ms"]["met"] is True
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(result[name]) == PERCENTILES


def test_load_of_a_trace_at_several_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03.0000000,40,3", "2023-11-16 18:17:03.2000000,30,2"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    load = ["--trace", str(trace), "--seconds", "1", "--warmup", "0", "--repeat", "2"]
    assert main(["bench", "load", *TINY, *load, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"]["ok"] == 4
    assert len(result["repeats"]) == 2
    assert set(result["ci95"]["e2e_ms"]) == PERCENTILES


def test_streams_of_other_classes_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rate", "10", "--seconds", "1", "--warmup", "0", "--mix", "16:2"]
    beside = ["--beside", "car=p0,7,16:3", "--beside", "bot=p1,5,40:4"]
    assert main(["bench", "load", *TINY, *load, *beside, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"]["ok"] == 10
    assert {name: found["ok"] for name, found in result["beside"].items()} == {"car": 7, "bot": 5}
    assert set(result["beside"]["car"]["ttft_ms"]) == PERCENTILES


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--batch", "0"], "0 is too small"),
        (["load", "--rate", "1", "--beside", "car=p7,1,16:3"], "is no stream"),
        (["load", "--rate", "1", "--beside", "car=p0,0,16:3"], "the rate of a stream must be more than 0"),
        (["load", "--rate", "1", "--beside", "p0,1,16:3"], "is no stream"),
        (["load"], "one of the arguments --rate --rates --concurrency --burst --trace is required"),
        (["load", "--rate", "0"], "is not a number above 0"),
        (["load", "--rate", "1", "--mix", "64"], "is not a mix"),
        (["load", "--rate", "1", "--target-ttft", "80"], "is not a time"),
        (["compare", "a", "b", "--tolerance", "x"], "is not a share: write it as in 3% or 0.03"),
        (["steps", "--max-rows", "-1"], "-1 is too small"),
        ([], "the following arguments are required: WHAT"),
    ],
)
def test_bad_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *argv])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("what", ["latency", "load", "steps", "layout", "compare"])
def test_each_measurement_explains_itself(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", what, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: firsttoken bench {what}" in text
    assert max(map(len, text.splitlines())) <= 118


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["load", "random:tiny-llama", "--rate", "0.01", "--seconds", "1"], "no request at all"),
    ],
)
def test_what_cannot_be_measured(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- a scripted engine


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch):
    """Runs ``work`` on a session around a scripted engine; gives its result and the requests that the engine saw."""

    def go(work: Work, script: Callable[..., Any] = echo, **options: Any) -> tuple[dict[str, Any], list[Any]]:
        seen: list[Any] = []

        def noted(request: Any) -> Any:
            seen.append(request)
            # The session's own first request must pass.
            return echo(request) if len(seen) == 1 else script(request)

        async def launch(args: EngineArgs, *, handle: None) -> AsyncLLM:
            llm = AsyncLLM(StubEngine(noted, **options), model_name="stub")
            await llm.start()
            return llm

        monkeypatch.setattr(AsyncLLM, "launch", launch)

        async def run() -> dict[str, Any]:
            async with open_session(EngineArgs(), now_ns()) as session:
                return await work(session)

        return asyncio.run(run()), seen[1:]

    return go


def test_no_two_prompts_are_alike(measure) -> None:
    config = LatencyConfig(batch=3, input=20, output=4, repeat=2, warmup=1)
    result, seen = measure(lambda session: measure_latency(session, config))
    assert len({request.prompt for request in seen}) == len(seen) == 9
    assert {request.max_tokens for request in seen} == {4}
    assert all(request.params.ignore_eos and request.params.temperature == 0 for request in seen)
    assert len(result["rounds"]) == 2


def test_gaps_are_those_of_the_engine(measure) -> None:
    config = LatencyConfig(batch=2, input=8, output=9, repeat=1, warmup=0)
    result, _ = measure(lambda session: measure_latency(session, config), step_s=0.02)
    assert result["tpot_ms"]["p50"] == pytest.approx(20, rel=0.5)
    assert result["tokens_per_s"] == pytest.approx(18 / result["rounds"][0]["wall_s"])
    # A stub tells no memory, and takes no CPU time that it would tell.
    assert result["peak_memory_gib"] is None
    assert result["host_us_per_step"] == 0


def test_one_failed_request_fails_the_latency_measurement(measure) -> None:
    config = LatencyConfig(batch=2, input=8, output=4, repeat=1)
    with pytest.raises(BenchFailed, match="requests failed, the first one: GenerationFailed: scripted fault"):
        measure(lambda session: measure_latency(session, config), lambda request: [1, Fault()])


def test_requests_too_long_for_the_engine_are_bad_usage(measure) -> None:
    config = LatencyConfig(input=100, output=29)
    with pytest.raises(ConfigError, match="129 tokens is longer than this engine's 128"):
        measure(lambda session: measure_latency(session, config), max_model_len=128)


def test_load_counts_failures_by_reason_and_leaves_them_out_of_goodput(measure) -> None:
    config = LoadConfig(mix=Mix((8, 9), (4,)), rate=200, seconds=0.2, warmup_s=0, target_itl_ms=1e4)

    def script(request: Any) -> list[Any]:
        return [1, Fault("broken")] if len(request.prompt) == 9 * 4 else echo(request)

    result, seen = measure(lambda session: measure_load(session, config), script)
    failed = sum(len(request.prompt) == 9 * 4 for request in seen)
    assert 0 < failed < 40
    assert result["requests"] == {
        "sent": 40,
        "ok": 40 - failed,
        "failed": failed,
        "reasons": {"GenerationFailed: broken": failed},
    }
    assert result["goodput_rps"] == pytest.approx((40 - failed) / result["wall_s"])


def test_load_without_any_answer_fails(measure) -> None:
    config = LoadConfig(mix=Mix((8,), (4,)), rate=50, seconds=0.1, warmup_s=0)
    with pytest.raises(BenchFailed, match="none of 5 requests was answered"):
        measure(lambda session: measure_load(session, config), lambda request: [Fault("broken")])


def test_load_says_which_target_was_missed(measure) -> None:
    config = LoadConfig(mix=Mix((8,), (4,)), rate=50, seconds=0.2, warmup_s=0, target_ttft_ms=1e-3, target_itl_ms=1e5)
    result, _ = measure(lambda session: measure_load(session, config))
    assert {name: target["met"] for name, target in result["targets"].items()} == {"ttft_ms": False, "itl_ms": True}
    assert result["goodput_rps"] == 0


def test_concurrency_keeps_so_many_requests_running(measure) -> None:
    config = LoadConfig(mix=Mix((8,), (3,)), concurrency=4, seconds=0.3, warmup_s=0)
    result, seen = measure(lambda session: measure_load(session, config), step_s=0.005)
    assert result["requests"]["sent"] == result["requests"]["ok"] == len(seen) > 4
    # Each of the four has at most one under way.
    assert result["output_tokens_per_s"] < 4 / 0.005
    assert result["late_ms"] == {}
