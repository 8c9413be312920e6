from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken.cli import main as cli

LOAD = ["frontier", "--seconds", "1", "--mix", "64,256:4,16", "--rates", "10,20"]


def test_the_result_is_a_list_of_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png, output = tmp_path / "frontier.png", tmp_path / "frontier.json"
    argv = [*LOAD, "--policies", "default,fcfs-512", "--windows", "0,adaptive", "--png", str(png)]
    assert cli.main([*argv, "--json", "--output", str(output)]) == 0
    points = json.loads(capsys.readouterr().out)
    assert [(point["policy"], point["offered_rps"]) for point in points] == [
        (policy, rate)
        for policy in ("default", "default, window adaptive", "fcfs-512", "fcfs-512, window adaptive")
        for rate in (10, 20)
    ]
    assert list(points[0]) == ["policy", "offered_rps", "goodput_rps", "ttft_p99_ms", "itl_p99_ms"]
    assert 0 < points[0]["ttft_p99_ms"] < 1000
    assert png.read_bytes().startswith(b"\x89PNG")
    kept = json.loads(output.read_text(encoding="utf-8"))
    assert kept["points"] == points
    assert kept["targets"] == {"ttft_ms": 1000.0, "itl_ms": 50.0, "file": None}
    assert kept["sustained"]["mixed"] > 1


def test_targets_decide_the_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*LOAD, "--windows", "0", "--target-ttft", "1us", "--json"]
    assert cli.main(argv) == 0
    assert {point["goodput_rps"] for point in json.loads(capsys.readouterr().out)} == {0.0}


def test_people_get_a_table_that_marks_the_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LOAD, "--windows", "0,50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("default  ") and line.endswith("on the frontier") for line in lines)
    assert any(line.startswith("default, window 50") for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policies", "fastest"], "'fastest' is no policy"),
        (["--windows", "wide"], "'wide' is no batch window"),
        (["--mix", "64"], "--mix: '64' is not a mix"),
        (["--rates", "0.1"], "no request at all"),
    ],
)
def test_bad_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LOAD, *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--rates", "10,"], ["--rates", "0"], ["--seconds", "0"]])
def test_usage_that_the_parser_refuses(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["frontier", *argv])
    assert ended.value.code == 2
