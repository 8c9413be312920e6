"""The accuracy base and what is measured on it: a folder that the engine reads as plain torch does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks import accuracy
from benchmarks.gpu.train_base import Llama, Shape, main, split
from safetensors.torch import load_file
from tokenizers import Tokenizer

SHAPE = Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=300, context=32)
SIZES = [f"--{name.replace('_', '-')}={value}" for name, value in vars(SHAPE).items() if isinstance(value, int)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    text = folder / "text.jsonl"
    words = [
        "the",
        "sea",
        "was",
        "calm",
        "and",
        "the",
        "old",
        "ship",
        "went",
        "on",
        "to",
        "the",
        "north",
        "where",
        "no",
        "ship",
    ]
    documents = [
        {"source": "test", "title": str(number), "text": " ".join(words[number % 7 :] * 3 + words[: number % 5])}
        for number in range(80)
    ]
    text.write_text("\n".join(map(json.dumps, documents)))
    asked = ["--text", str(text), "--output", str(folder / "model"), "--device", "cpu", "--steps", "6", "--every", "2"]
    assert main([*asked, "--batch", "4", "--rate", "0.01", *SIZES]) == 0
    return folder


def test_documents_are_in_one_part_each_whatever_their_order(base: Path) -> None:
    lines = (base / "text.jsonl").read_text().split("\n")
    turned = base / "turned.jsonl"
    turned.write_text("\n".join(reversed(lines)))
    parts = split([base / "text.jsonl"])
    assert split([turned]) == parts
    assert len(parts.train) + len(parts.validation) + len(parts.held_out) == len(lines)
    turned.write_text(lines[0])
    with pytest.raises(ValueError, match=r"falls to .*: give more text"):
        split([turned])


def test_the_engines_perplexity_is_that_of_the_model_that_was_trained(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = base / "model", base / "accuracy.json"
    asked = ["--model", str(folder), "--text", str(folder / "held_out.txt"), "--output", str(output)]
    cases = ["--case", "kv:int4", "--case", "nonsense", "--folder", f"same={folder}"]
    sizes = ["--context", "32", "--tokens", "70", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    assert accuracy.main([*asked, *cases, *sizes]) == 0
    said = json.loads(output.read_text())
    assert str(base) not in output.read_text(), "where files lay is nobody's business"

    model = Llama(SHAPE, 0.0).eval()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): one.float() for name, one in weights.items()})
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode((folder / "held_out.txt").read_text()).ids[:70]
    with torch.no_grad():
        parts = [torch.tensor([ids[first : first + 32]]) for first in (0, 32, 64)]
        total = sum(float(model.loss(part)) * (part.shape[1] - 1) for part in parts)
    assert said["tokens"] == 67
    assert said["perplexity"] == pytest.approx(math.exp(total / 67), rel=1e-4)

    kv, refused, same = said["cases"]
    assert (kv["kv_dtype"], kv["perplexity_change"]) == ("int4", pytest.approx(0, abs=0.1))
    assert kv["kl"] > 0
    assert refused["refused"].startswith("quantization must be one of")
    assert (same["case"], same["top1_agreement"]) == ("same", pytest.approx(1, abs=0.1))
    assert "nonsense: refused" in capsys.readouterr().out
