"""The self-check of a start: what it finds of right and of damaged files, and what a caller sees of it."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from firsttoken import LLM
from firsttoken.bench.self_check import GIVEN, LONGEST, PROMPTS, record
from firsttoken.checkpoint.self_check import FILE
from firsttoken.cli.main import main
from firsttoken.core.agreement import SelfCheck
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.engine import self_check as room
from firsttoken.observability.self_check import self_check_families
from tests.support.tiny_folder import damage, write_tiny_folder

FULL = {"dtype": "float32", "quantization": "none", "device": "cpu", "threads": 1}
POSITIONS = len(PROMPTS) * (LONGEST - GIVEN)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SelfCheck]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    return folder, record(folder, EngineArgs(model=str(folder), **FULL))


@pytest.fixture
def folder(recorded: tuple[Path, SelfCheck], tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded[0], tmp_path / "tiny"))


def checked(folder: Path, **options: object) -> SelfCheck | None:
    with LLM(str(folder), **{**FULL, **options}) as llm:
        return llm.info.self_check


def test_a_right_file_is_as_it_was_whatever_the_engines_sizes(recorded: tuple[Path, SelfCheck]) -> None:
    folder, then = recorded
    assert (then.tokens, then.top1_agreement) == (POSITIONS, pytest.approx(1.0, abs=0.02))
    for sizes in ({}, {"max_num_seqs": 1}, {"max_num_seqs": 3, "max_model_len": 20}):
        found = checked(folder, **sizes)
        assert found is not None
        assert found.tokens == (POSITIONS if "max_model_len" not in sizes else POSITIONS * (20 - GIVEN) // 16)
        assert (found.top1_agreement, found.kl) == (1.0, pytest.approx(0, abs=1e-6))
        assert found.perplexity == pytest.approx(found.reference_perplexity, rel=1e-4)


def test_the_perplexity_is_that_of_the_engines_own_answers(recorded: tuple[Path, SelfCheck]) -> None:
    """Of another road to the same: the reference was asked by requests, and this is what their file adds up to."""
    folder, _ = recorded
    told = json.loads((folder / FILE).read_text())
    mean = sum(guess[0] for guess in told["guesses"]) / POSITIONS
    found = checked(folder)
    assert found is not None
    assert found.perplexity == pytest.approx(math.exp(-mean), rel=1e-4)


def test_damaged_weights_are_refused_with_the_figures_unless_asked_not_to_look(folder: Path) -> None:
    damage(folder, UP)
    with pytest.raises(CheckpointError, match=r"tiny: the weights do not .* at \d+\.\d% of 128 positions .*, KL \d"):
        LLM(str(folder), **FULL)
    assert checked(folder, self_check=False) is None


def test_what_an_option_rounds_is_told_and_not_refused(folder: Path) -> None:
    """Right weights and KV of four bits; and to show that nothing is refused then, weights that are not right."""
    right = checked(folder, kv_dtype="int4")
    assert right is not None
    assert 0 < right.kl < 0.3
    damage(folder, UP)
    wrong = checked(folder, kv_dtype="int4")
    assert wrong is not None
    assert wrong.kl > 1


def test_a_folder_of_rounded_weights_tells_its_distance_and_is_held_to_its_own(
    recorded: tuple[Path, SelfCheck], tmp_path: Path
) -> None:
    """As one of bad rounding is: far from the model in full, and right all the same."""
    rough = Path(shutil.copytree(recorded[0], tmp_path / "rough"))
    damage(rough, UP)
    told = record(rough, EngineArgs(model=str(recorded[0]), **FULL))
    assert told.kl > 1
    found = checked(rough)
    assert found is not None
    assert found.kl == pytest.approx(told.kl, rel=0.02)


def test_a_folder_without_a_reference_runs_nothing(folder: Path) -> None:
    (folder / FILE).unlink()
    with LLM(str(folder), **FULL) as llm:
        assert llm.info.self_check is None
        assert "self_check" not in llm.info.start_ms


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("not json", r"self_check\.json: is no self-check's reference \(.*\): make it anew"),
        ({"format": 2}, r"self_check\.json: format: is 2, and this version reads 1"),
        ({"guesses": []}, r"self_check\.json: guesses: has 0, and the prompts 128 positions"),
        ({"prompts": [[0] * 8 + [999]]}, r"self_check\.json: prompts\[0\]: has token 999, and the model 259"),
        ({"threshold": 1}, r"unknown field `threshold`"),
        ({"guesses": [[-1e308, [[1, -1.0]]]] * POSITIONS}, r"guesses\[0\]: has -1e\+308, which is the logarithm of no"),
        ({"own": [[-1.0, [[1, 800.0]]]] * POSITIONS}, r"own\[0\]: has 800, which is the logarithm of no probability"),
        ({"own": [[-1.0, [[259, -1.0]]]] * POSITIONS}, r"own\[0\]: must name different tokens of the model's 259"),
        ({"own": [[-1.0, [[1, -1.0], [1, -2.0]]]] * POSITIONS}, r"own\[0\]: must name different tokens"),
        ({"limits": {"min_top1_agreement": 1e308, "max_kl": 1}}, "limits: must ask for an agreement from 0 to 1"),
    ],
)
def test_a_damaged_reference_is_refused_by_name(folder: Path, change: str | dict[str, object], words: str) -> None:
    path = folder / FILE
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        LLM(str(folder), **FULL)


def test_a_pipe_in_its_place_is_not_waited_for(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with pytest.raises(CheckpointError, match=r"self_check\.json: is no regular file"):
        LLM(str(folder), **FULL)


def test_a_slow_machine_leaves_positions_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_S", 0)
    found = checked(folder)
    assert found is not None
    assert (found.tokens, found.top1_agreement) == (len(PROMPTS), 1.0)


def test_recording_on_the_command_line_tells_the_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / FILE).unlink()
    text = tmp_path / "text.txt"
    text.write_text("a few words", encoding="utf-8")
    asked = ["eval", str(folder), "--text", str(text), "--threads", "1", "--json", "--record-self-check"]
    assert main(asked) == 0
    said = json.loads(capsys.readouterr().out)["self_check"]
    assert (said["tokens"], said["top1_agreement"]) == (POSITIONS, pytest.approx(1.0, abs=0.1))
    assert json.loads((folder / FILE).read_text())["limits"]["min_top1_agreement"] > 0.8
    with pytest.raises(ConfigError, match="smollm2 is no folder"):
        record(Path("smollm2"), EngineArgs())


def test_the_figures_are_metrics() -> None:
    found = SelfCheck(tokens=4, top1_agreement=0.75, kl=0.5, perplexity=3.0, reference_perplexity=2.0)
    samples = {sample.name: sample.value for family in self_check_families(found) for sample in family.samples}
    assert samples["firsttoken_self_check_top1_agreement"] == 0.75
    assert samples["firsttoken_self_check_kl_nats"] == 0.5
    assert msgspec.json.decode(msgspec.json.encode(found), type=SelfCheck) == found
