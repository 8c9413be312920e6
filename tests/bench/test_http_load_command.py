"""`bench load URL` on the server with a scripted engine, and on one with a real tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from firsttoken.cli.main import main

ROOT = Path(__file__).parents[2]
STEP_MS = 10.0  # of tests/server/stub_server.py
PERCENTILES = {"mean", "p50", "p90", "p95", "p99", "max"}
KEY = "sk-very-secret"


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """The URL of a server process that says on its first lines where it serves."""
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0]
                break
        else:
            pytest.fail("the server did not start")
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    config = json.dumps({"host": "127.0.0.1", "port": 0, "api_keys": [KEY]})
    with serving("tests/server/stub_server.py", config, "0", "") as url:
        yield url


def load(url: str, *words: str, code: int = 0, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["bench", "load", url, "--api-key", KEY, "--warmup", "0", *words, "--json"]) == code
    out = capsys.readouterr().out
    assert KEY not in out
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.clock
def test_open_loop(stub: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", "20", "--seconds", "1.5", "--mix", "16,40:8,12", "--target-ttft", "10s", "--target-itl", "10s"]
    result = load(stub, *words, capsys=capsys)
    assert result["requests"] == {"sent": 30, "ok": 30, "failed": 0, "short": 0, "reasons": {}}
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(result[name]) == PERCENTILES
    assert result["requests_per_s"] == result["goodput_rps"] == pytest.approx(30 / result["wall_s"])
    assert result["output_tokens_per_s"] == pytest.approx(result["tokens"]["output"] / result["wall_s"])
    assert result["tokens"]["counted_by"] == {"usage of each chunk": 30}
    assert result["tokens"]["input"] == result["tokens"]["input_asked"]
    # The scripted engine's step takes a little longer than it sleeps.
    assert STEP_MS <= result["tpot_ms"]["p50"] < 2 * STEP_MS
    assert (result["model"], result["route"], result["url"]) == ("stub", "/completions", f"{stub}/v1")
    assert {target["met"] for target in result["targets"].values()} == {True}
    assert set(result["client"]) >= {"cpu_share", "cpu_us_per_token", "loop_lag_ms", "connections"}


def test_a_missed_target_exits_with_1(stub: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", "10", "--seconds", "0.5", "--mix", "8:4", "--target-itl", "1ms"]
    result = load(stub, *words, code=1, capsys=capsys)
    assert result["targets"]["itl_ms"]["met"] is False
    assert result["goodput_rps"] == 0


def test_closed_loop_of_chats(stub: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--concurrency", "4", "--seconds", "1", "--mix", "300:8", "--chat", "--repeat", "2"]
    result = load(stub, *words, capsys=capsys)
    assert result["requests"]["ok"] == result["requests"]["sent"] > 8
    assert result["route"] == "/chat/completions"
    # Words are of different lengths to a tokenizer of bytes.
    assert result["tokens"]["input"] == pytest.approx(result["tokens"]["input_asked"], rel=0.1)
    assert len(result["repeats"]) == 2
    means = [run["ttft_ms"]["p50"] for run in result["repeats"]]
    assert result["ttft_ms"]["p50"] == pytest.approx(sum(means) / 2)
    assert result["ci95"]["ttft_ms"]["p50"] == pytest.approx(12.706 * abs(means[0] - means[1]) / 2, rel=1e-3)
    assert result["late_ms"] == {}


def test_sweep_with_a_picture(stub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.png"
    words = ["--rates", "4,16", "--seconds", "0.5", "--mix", "8:4", "--png", str(picture)]
    result = load(stub, *words, capsys=capsys)
    assert [one["rate"] for one in result["results"]] == [4, 16]
    assert [one["requests"]["ok"] for one in result["results"]] == [2, 8]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_trace_and_bursts(stub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(0, [1]), (1000, [1]), (2000, [2]), (60_000, [3])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 100, "output_length": 4, "hash_ids": ids}) + "\n"
            for at, ids in lines
        )
    )
    result = load(stub, "--trace", str(trace), "--scale", "4", "--seconds", "1", capsys=capsys)
    assert result["requests"]["ok"] == 3
    assert (result["trace"], result["scale"], result["mix"]) == ("trace.jsonl", 4, None)
    result = load(stub, "--burst", "5,every 0.3s", "--seconds", "0.5", "--mix", "8:4", capsys=capsys)
    assert result["requests"]["ok"] == 10


def test_for_people(stub: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--rate",
        "10",
        "--seconds",
        "0.5",
        "--warmup",
        "0",
        "--mix",
        "8:1",
        "--repeat",
        "2",
        "--target-ttft",
        "9s",
    ]
    assert main(["bench", "load", stub, "--api-key", KEY, *words]) == 0
    text = capsys.readouterr().out
    assert "10 requests sent, 10 ok, 0 failed" in text
    assert "means of 2 runs, 95 % confidence: TTFT p50" in text
    assert "tokens counted by: usage of each chunk (10)" in text
    assert "this client: " in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--rate", "1", "--api-key", "wrong"], 2, "give it by --api-key"),
        (["--rate", "1", "--api-key", KEY, "--model", "other"], 2, "the model (--model)?"),
        (["--rate", "1", "--max-num-seqs", "4"], 2, "--max-num-seqs is for an engine"),
        (["--rate", "1", "--beside", "car=p0,4,64:32"], 2, "--beside is for an engine"),
        (["--rate", "0.01", "--seconds", "1"], 2, "no request at all"),
        (["--rate", "1", "--png", "x.png"], 2, "give several by --rates"),
        (["--rate", "1", "--scale", "2"], 2, "--scale speeds a trace up"),
        (["--trace", "nowhere.jsonl"], 1, "nowhere.jsonl"),
    ],
)
def test_refusals(stub: str, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", stub, *words]) == code
    assert message in capsys.readouterr().err


def test_what_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "http://127.0.0.1:9", "--rate", "1"]) == 1
    assert "Is the server running there?" in capsys.readouterr().err
    assert main(["bench", "load", "http://127.0.0.1:x", "--rate", "1"]) == 2
    assert main(["bench", "load", "random:tiny-llama", "--chat", "--rate", "1"]) == 2
    assert "--chat is for a server's URL" in capsys.readouterr().err


def test_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", "firsttoken.cli.main", "serve", "random:tiny-llama", "--device", "cpu", "--threads", "1"]
    with serving(*command, "--port", "0") as url:
        words = ["--rate", "20", "--seconds", "1", "--mix", "16,40:2,9"]
        assert main(["bench", "load", url, *words, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
    assert result["requests"]["ok"] == result["requests"]["sent"] == 20
    assert result["tokens"]["input"] == result["tokens"]["input_asked"]
    # A model without a tokenizer has no text: its tokens are seen by their ids only.
    assert result["tokens"]["counted_by"] == {"token ids": 20}
    assert 0 < result["ttft_ms"]["p50"] < result["e2e_ms"]["p50"] < 5000
