"""What the GPU benchmarks check kernels with can be made, and the commands they run are ones that there are: they
themselves run only where there is a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu import all as every
from benchmarks.gpu import figures
from benchmarks.gpu.attention_checks import problems
from benchmarks.gpu.cases import Case, Places, Target, figure, run, verdicts


def test_every_attention_problem_can_be_made() -> None:
    names = [name for name, _ in problems(False, "meta")]
    assert {name.split()[0] for name in names} == {"decode", "write_kv", "prefill"}


@pytest.mark.parametrize("cases", [every.CASES, figures.CASES])
def test_cases_name_modules_that_there_are(cases: tuple[Case, ...]) -> None:
    assert len({case.name for case in cases}) == len(cases)
    places = Places(Path("results"), work="work", text="text", model="model", large="large")
    for case in cases:
        assert importlib.util.find_spec(case.words[0]) is not None, case.words
        for small in (False, True):
            assert "{" not in " ".join(places.command(case, small)), case


def test_a_case_that_fails_is_told_and_leaves_what_it_said(tmp_path: Path) -> None:
    places = Places(tmp_path, work=str(tmp_path / "work"))
    failed = run(Case("failed", ("json.tool", "{work}/none"), 60), places)
    assert failed.problem == "ended with code 2" or failed.problem == "ended with code 1"
    assert "none" in (tmp_path / "failed.log").read_text()
    late = run(Case("late", ("timeit", "-n1", "-r1", "import time; time.sleep(60)"), 0), places)
    assert late.problem == "not done after 0 s"
    assert late.seconds < 30
    missing = Case("missing", ("json.tool",), 1, needs=("{work}/none", "{text}"))
    assert Places(tmp_path, work=str(tmp_path), text="").missing(missing) == [f"{tmp_path}/none", ""]


def test_a_result_is_kept_beside_what_it_should_reach(tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text(json.dumps({"gap": {"p50": 2.5}, "rates": [{"x": 3}]}))
    targets = (Target("gap.p50", 2.6), Target("rates.0.x", 4, more=True), Target("rates.1.x", 4))
    case = Case("good", ("json.tool", "{dir}/made.json"), 60, targets, result="{dir}/made.json")
    places = Places(tmp_path)
    assert run(case, places).problem is None
    assert not (tmp_path / "good.log").exists()
    assert verdicts(case, places) == [
        "gap.p50 = 2.5 (2.6: reached)",
        "rates.0.x = 3.0 (4: MISSED)",
        "rates.1.x = None (4: MISSED)",
    ]
    assert figure({"a": [1]}, "a.x") is None


def test_steps_are_chosen_by_name() -> None:
    assert [case.name for case in every.chosen("right,features")] == ["features", "right"]
    with pytest.raises(ValueError, match="no step is called nothing: there are train_base, "):
        every.chosen("nothing")
