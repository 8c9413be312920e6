"""Verdicts over two results, and over folders of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.bench.compare import compare, judge
from firsttoken.cli.main import main
from firsttoken.core.errors import ConfigError


def result(ttft: float = 10.0, rate: float = 100.0, **more: Any) -> dict[str, Any]:
    return {"model": "m", "batch": 1, "ttft_ms": {"p50": ttft, "p99": ttft * 2}, "tokens_per_s_median": rate, **more}


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def verdicts(tmp_path: Path):
    def go(old: Any, new: Any, tolerance: float = 0.03, metrics: tuple[str, ...] = ()) -> dict[str, str]:
        found = compare(write(tmp_path / "old.json", old), write(tmp_path / "new.json", new), tolerance, metrics)
        return {one.case: one.verdict for one in found}

    return go


@pytest.mark.parametrize(
    ("old", "new", "higher", "verdict"),
    [
        (100, 103, False, "same"),
        (100, 103.1, False, "worse"),
        (100, 96.9, False, "better"),
        (100, 97, True, "same"),
        (100, 96.9, True, "worse"),
        (100, 103.1, True, "better"),
        (0, 0, False, "same"),
        (0, 1, False, "worse"),
        (0, 1, True, "better"),
        (None, 1, False, "new"),
        (1, None, False, "missing"),
    ],
)
def test_verdict(old: float | None, new: float | None, higher: bool, verdict: str) -> None:
    one = judge("x", old, new, 0.03, higher=higher)
    assert one.verdict == verdict
    assert one.failed is (verdict in ("worse", "missing"))
    assert one.ratio == (None if not old or new is None else new / old)


def test_latencies_fall_and_rates_rise(verdicts) -> None:
    assert verdicts(result(), result(ttft=9, rate=110)) == {
        "ttft_ms.p50": "better",
        "tokens_per_s_median": "better",
    }
    assert set(verdicts(result(), result(ttft=11, rate=90)).values()) == {"worse"}


def test_a_figure_that_is_gone_is_missing(verdicts) -> None:
    assert verdicts(result(), {"ttft_ms": {"p50": 10}})["tokens_per_s_median"] == "missing"


def test_further_metrics(verdicts) -> None:
    assert verdicts(result(), result(ttft=11), metrics=("ttft_ms.p99",))["ttft_ms.p99"] == "worse"
    assert verdicts(result(goodput_rps=5), result(goodput_rps=4), metrics=("goodput_rps",))["goodput_rps"] == "worse"
    with pytest.raises(ConfigError, match=r"neither result has the figure 'ttft_ms\.p42'"):
        verdicts(result(), result(), metrics=("ttft_ms.p42",))


def test_tables_are_compared_row_by_row(verdicts) -> None:
    rows = [{"kind": "decode", "decode_rows": n, "context": 128, "ms": float(n)} for n in (1, 2)]
    slower = [rows[0], {**rows[1], "ms": 2.2}]
    assert list(verdicts({"steps": rows}, {"steps": slower}).values()) == ["same", "worse"]
    layouts = [{"tensor": "kv", "layout": "a", "gb_s": 100.0}]
    assert list(verdicts({"layouts": layouts}, {"layouts": [{**layouts[0], "gb_s": 90.0}]}).values()) == ["worse"]


def test_different_cases_are_refused(verdicts) -> None:
    with pytest.raises(ConfigError, match="batch is 1 against 8"):
        verdicts(result(), result(batch=8))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "its top is no object")])
def test_what_is_no_result_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        compare(tmp_path / "a.json", tmp_path / "a.json", 0.03)


def test_files_without_figures_are_refused(verdicts) -> None:
    with pytest.raises(ConfigError, match="hold no figure"):
        verdicts({"a": 1}, {"a": 2})


def test_folders_are_matched_by_name(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("same", "gone"):
        write(old / f"{name}.json", result())
    write(new / "same.json", result())
    write(new / "deep" / "more.json", result())
    found = {one.case: one.verdict for one in compare(old, new, 0.03)}
    assert found == {
        "deep/more": "new",
        "gone": "missing",
        "same: ttft_ms.p50": "same",
        "same: tokens_per_s_median": "same",
    }
    with pytest.raises(ConfigError, match="two files or two folders"):
        compare(old, new / "same.json", 0.03)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no \.json file"):
        compare(tmp_path / "empty", new, 0.03)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write(tmp_path / "a.json", result()), write(tmp_path / "b.json", result(ttft=10.5))
    assert main(["bench", "compare", str(old), str(old)]) == 0
    assert main(["bench", "compare", str(old), str(new)]) == 1
    assert main(["bench", "compare", str(old), str(new), "--tolerance", "6%"]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", str(old), str(new), "--json"]) == 1
    first = json.loads(capsys.readouterr().out)[0]
    assert first == {"case": "ttft_ms.p50", "old": 10.0, "new": 10.5, "ratio": 1.05, "verdict": "worse"}
    assert main(["bench", "compare", str(old), str(tmp_path / "c.json")]) == 2


def test_sweeps_are_compared_rate_by_rate(verdicts) -> None:
    def sweep(*ttfts: float) -> dict[str, Any]:
        rows = [{"rate": 2.0**place, "ttft_ms": {"p50": ttft}} for place, ttft in enumerate(ttfts)]
        return {"model": "m", "rates": [1, 2], "results": rows}

    assert verdicts(sweep(10, 20), sweep(10, 30)) == {
        "rate 1: ttft_ms.p50": "same",
        "rate 2: ttft_ms.p50": "worse",
    }
    assert verdicts(sweep(10, 20), sweep(10)) == {"rate 1: ttft_ms.p50": "same", "rate 2: ttft_ms.p50": "missing"}
