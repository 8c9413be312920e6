"""BLOOM, Gemma and sliding windows against transformers, and however a prompt is cut into steps.

Largest difference of logits seen: 1.1e-5; allowed: 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.core.errors import CheckpointError
from firsttoken.models import DecoderModel, load_model
from firsttoken.models.attention import alibi_slopes
from tests.support.hf_families import CASES, save_model
from tests.support.tiny_models import Runner

TOLERANCE = 1e-4
# One of ours against another: only the order of float32 sums differs.
SAME = 2e-5
# One of each family, and what differs most within it.
FEW = ["mistral", "qwen2", "qwen3", "gemma2 low caps, biases", "gemma3", "bloom"]


@dataclass(frozen=True)
class Tiny:
    folder: Path
    theirs: transformers.PreTrainedModel
    ours: DecoderModel

    def logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            return self.theirs(torch.tensor([ids])).logits[0]


def load(folder: Path, dtype: str = "float32", quantization: str = "none") -> DecoderModel:
    return load_model(open_checkpoint(str(folder)), device="cpu", dtype=dtype, quantization=quantization)


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("family")
    theirs = save_model(request.param, folder)
    return Tiny(folder, theirs, load(folder))


few = pytest.mark.parametrize("tiny", FEW, indirect=True)


@pytest.fixture
def prompt() -> list[int]:
    """Longer than every window that is shorter than the context."""
    return torch.randint(0, 211, (75,), generator=torch.Generator().manual_seed(1)).tolist()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("tiny", CASES, indirect=True)
def test_logits_equal(tiny: Tiny, prompt: list[int]) -> None:
    expected = tiny.logits(prompt)
    assert expected.abs().max() > 0.5
    assert difference(Runner(tiny.ours).whole(prompt), expected) < TOLERANCE


@few
@pytest.mark.parametrize("length", [12, 13, 14, 16, 17, 18, 20, 21, 32, 33])
def test_lengths_around_the_windows(tiny: Tiny, prompt: list[int], length: int) -> None:
    ids = prompt[:length]
    assert difference(Runner(tiny.ours).whole(ids), tiny.logits(ids)) < TOLERANCE


@few
def test_greedy_tokens_equal(tiny: Tiny, prompt: list[int]) -> None:
    ids = prompt[:9]
    runner, table = Runner(tiny.ours), torch.arange(4)
    last = runner.step([(ids, 0, table)])[0][-1]
    made: list[int] = []
    for _ in range(30):
        made.append(int(last.argmax()))
        last = runner.step([([made[-1]], len(ids) + len(made) - 1, table)])[0][-1]
    # One forward pass over the whole: each token must be the likeliest after those before it.
    assert tiny.logits(ids + made).argmax(-1)[len(ids) - 1 : -1].tolist() == made


@few
@pytest.mark.parametrize("size", [2, 7, 16, 31])
def test_chunked_is_whole(tiny: Tiny, prompt: list[int], size: int) -> None:
    whole = Runner(tiny.ours).whole(prompt)
    runner = Runner(tiny.ours)
    table = runner.table(prompt)
    parts = [runner.step([(prompt[i : i + size], i, table)])[0] for i in range(0, len(prompt), size)]
    assert difference(torch.cat(parts), whole) < SAME


@few
def test_batched_is_alone(tiny: Tiny, prompt: list[int]) -> None:
    """Decode rows shorter and longer than the window, a chunk and a whole prompt in one step."""
    whole = Runner(tiny.ours).whole(prompt)
    runner = Runner(tiny.ours)
    starts = [74, 3, 16, 30]
    tables = [runner.table(prompt, 6 * row) for row in range(5)]
    for start, table in zip(starts, tables, strict=False):
        runner.step([(prompt[:start], 0, table)])
    work = [([prompt[start]], start, table) for start, table in zip(starts[:3], tables, strict=False)]
    work += [(prompt[30:50], 30, tables[3]), (prompt, 0, tables[4])]
    results = runner.step(work)
    for (ids, start, _), logits in zip(work, results, strict=True):
        assert difference(logits, whole[start : start + len(ids)]) < SAME


@few
def test_bfloat16_stays_near_float32(tiny: Tiny, prompt: list[int]) -> None:
    exact = Runner(tiny.ours).whole(prompt).log_softmax(-1)
    half = Runner(load(tiny.folder, "bfloat16")).whole(prompt).log_softmax(-1)
    assert (exact.exp() * (exact - half)).sum(-1).mean() < 4e-3


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 8, 12, 16, 25, 112])
def test_alibi_slopes_equal_those_of_transformers(heads: int) -> None:
    theirs = transformers.models.bloom.modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
    assert torch.allclose(alibi_slopes(heads), theirs, rtol=1e-6)


# ------------------------------------------------------------------ BLOOM's own tensor names


@pytest.mark.parametrize("tiny", ["bloom"], indirect=True)
def test_bloom_without_the_prefix_in_its_names(tiny: Tiny, prompt: list[int], tmp_path: Path) -> None:
    """As the published checkpoints have it."""
    weights = load_file(tiny.folder / "model.safetensors")
    copy_config(tiny.folder, tmp_path)
    save_file({name.removeprefix("transformer."): tensor for name, tensor in weights.items()}, target(tmp_path))
    assert torch.equal(Runner(load(tmp_path)).whole(prompt), Runner(tiny.ours).whole(prompt))


@pytest.mark.parametrize("tiny", ["bloom"], indirect=True)
def test_bloom_with_a_tensor_under_both_names_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    weights = load_file(tiny.folder / "model.safetensors")
    copy_config(tiny.folder, tmp_path)
    save_file(weights | {"ln_f.weight": torch.ones(60)}, target(tmp_path))
    with pytest.raises(CheckpointError, match="is the same tensor as") as caught:
        load(tmp_path)
    assert caught.value.field in ("ln_f.weight", "transformer.ln_f.weight")


@pytest.mark.parametrize(
    ("tiny", "name"),
    [
        ("bloom", "transformer.word_embeddings_layernorm.bias"),
        ("bloom", "transformer.h.1.self_attention.query_key_value.bias"),
        ("bloom", "transformer.ln_f.bias"),
        ("gemma2", "model.layers.2.post_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.3.self_attn.k_norm.weight"),
    ],
    indirect=["tiny"],
)
def test_a_missing_tensor_is_named(tiny: Tiny, name: str, tmp_path: Path) -> None:
    weights = load_file(tiny.folder / "model.safetensors")
    del weights[name]
    copy_config(tiny.folder, tmp_path)
    save_file(weights, target(tmp_path))
    with pytest.raises(CheckpointError, match=f"{name.split('.')[-1]} is missing"):
        load(tmp_path)


def copy_config(source: Path, folder: Path) -> None:
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())


def target(folder: Path) -> Path:
    return folder / "model.safetensors"
