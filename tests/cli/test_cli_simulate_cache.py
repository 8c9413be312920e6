from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken.cli import main as cli
from firsttoken.simulate.cache_compare import CACHE_POLICY_NAMES

TURNS = ([1, 2], [1, 2, 3], [4], [1, 2, 3, 5])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [
        json.dumps({"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
        for at, ids in enumerate(TURNS)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_the_result_has_its_public_names(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "result.json"
    argv = ["simulate", "cache", "--trace", trace, "--blocks", "2,100", "--policy", "all", "--json"]
    assert cli.main([*argv, "--output", str(kept)]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(entry["policy"], entry["blocks"]) for entry in results] == [
        (name, blocks) for name in CACHE_POLICY_NAMES for blocks in (2, 100)
    ]
    assert all(entry["hit_ratio"] == 0.5 for entry in results if entry["blocks"] == 100)
    written = json.loads(kept.read_text(encoding="utf-8"))
    assert written["results"] == results
    assert (written["trace"], written["requests"], written["prompt_blocks"]) == ("trace.jsonl", 4, 10)


def test_classes_are_told_for_people_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "cache", "--sessions", "1", "--seconds", "60", "--blocks", "50", "--p0", "20%", "--flood", "1"]
    assert cli.main(argv) == 0
    assert "p0 " in capsys.readouterr().out
    assert cli.main([*argv, "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert set(entry["classes"]["p0"]) == {"hit_ratio", "alone", "kept"}
    assert len(entry["early"]) == 3


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--policy", "mru"], "'mru' is no eviction policy"),
        (["--blocks", "10,x"], "--blocks: "),
        (["--p0", "150%"], "at most 1, got 1.5"),
        (["--sessions", "1"], "say which load: --trace or --sessions"),
    ],
)
def test_what_cannot_be_done_is_refused(
    trace: str, argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "cache", "--trace", trace, *argv]) == 2
    assert reason in capsys.readouterr().err


def test_a_trace_without_hashes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n", encoding="utf-8")
    assert cli.main(["simulate", "cache", "--trace", str(path)]) == 2
    assert "no prompt of the load has hash_ids" in capsys.readouterr().err
