"""``firsttoken eval``: its figures against the model's own logits, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from firsttoken.bench import accuracy
from firsttoken.bench.accuracy import guesses, windows
from firsttoken.bench.errors import BenchFailed
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli.main import main
from firsttoken.core.agreement import Guess, compare, perplexity
from firsttoken.models import load_model
from tests.support.tiny_models import Runner

TEXT = "The old library stood at the end of the street, behind two tall trees. Water boils at one hundred degrees."


def test_windows_leave_out_what_predicts_nothing() -> None:
    assert windows([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert windows([1, 2, 3, 4, 5], 9) == [[1, 2, 3, 4, 5]]
    with pytest.raises(BenchFailed, match="the text has 1 tokens"):
        windows([7], 4)


def test_agreement_and_divergence() -> None:
    certain = Guess(math.log(0.9), ((1, math.log(0.9)), (2, math.log(0.1))))
    other = Guess(math.log(0.5), ((2, math.log(0.5)), (1, math.log(0.5))))
    assert compare([certain], [certain]) == {"top1_agreement": 1.0, "kl": pytest.approx(0.0, abs=1e-6)}
    found = compare([other], [certain])
    assert found["top1_agreement"] == 0
    assert found["kl"] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), abs=1e-4)
    assert perplexity([certain, other]) == pytest.approx(1 / math.sqrt(0.45))


def test_numbers_that_are_not_finite_are_no_figure() -> None:
    answer = SimpleNamespace(logprobs=[{5: SimpleNamespace(logprob=float("nan"), rank=1)}])
    llm: Any = SimpleNamespace(generate=lambda prompts, params: [SimpleNamespace(outputs=[answer]) for _ in prompts])
    with pytest.raises(BenchFailed, match="position 0: the model gave no finite probability for token 5"):
        guesses(llm, [[4, 5]])


def test_how_far_it_is_is_told_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_AT_ONCE", 2)
    answer = SimpleNamespace(logprobs=[{5: SimpleNamespace(logprob=-1.0, rank=1)}])
    llm: Any = SimpleNamespace(generate=lambda prompts, params: [SimpleNamespace(outputs=[answer]) for _ in prompts])
    told: list[int] = []
    assert len(guesses(llm, [[5] * 6], told.append)) == 5
    assert told == [2, 4, 5]


@pytest.mark.model
def test_perplexity_is_that_of_the_models_own_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    asked = ["eval", "smollm2", "--text", str(path), "--context", "12", "--tokens", "22", "--json", "--threads", "1"]
    assert main([*asked, "--quantization", "none", "--dtype", "float32", "--reference", "smollm2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == 20, "the first of each window of 12 and 10 is not predicted"
    assert (said["top1_agreement"], said["kl"]) == (1.0, pytest.approx(0.0, abs=1e-6))
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.tokenizer is not None
    model = load_model(checkpoint, device="cpu", dtype="float32", quantization="none")
    from firsttoken import LLM

    with LLM("smollm2", threads=1) as llm:
        tokens = list(llm.get_tokenizer().encode(TEXT))[:22]
    logprobs = []
    for window in (tokens[:12], tokens[12:]):
        logits = Runner(model).whole(window)[:-1].log_softmax(-1)
        logprobs.append(logits.gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    expected = math.exp(-float(torch.cat(logprobs).mean()))
    assert said["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert said["reference_perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), (b"\xff\xfe\x00", "is not UTF-8 (invalid start byte at byte 0)")],
)
def test_a_text_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["eval", "smollm2", "--text", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert main(["eval", "random:tiny-llama", "--text", str(path), "--threads", "1"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
