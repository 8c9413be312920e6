"""One argument, MODEL: which rule decides, and what an error says was tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firsttoken.checkpoint.aliases import ALIASES, Alias, alias_path
from firsttoken.checkpoint.cache import cache_folder
from firsttoken.checkpoint.families import FAMILIES
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.shapes import SHAPES, tensor_shapes
from firsttoken.core.errors import CheckpointError
from tests.support.byte_tokenizer import VOCAB_SIZE, byte_tokenizer_spec


def test_folder_and_gguf(write_folder: Any, write_gguf: Any, tmp_path: Path) -> None:
    assert open_checkpoint(str(write_folder())).source == "folder"
    path = write_gguf()
    assert open_checkpoint(str(path)).source == "gguf"
    renamed = path.rename(tmp_path / "blob")
    assert open_checkpoint(str(renamed)).source == "gguf"


def test_a_relative_folder_wins_over_the_hub(
    write_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    write_folder(name="owner/model")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("owner/model").source == "folder"


@pytest.fixture
def tiny_alias(write_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The alias ``tiny`` with its file in the cache ``tmp_path / "cache"``."""
    path = write_gguf()
    alias = Alias(
        package="none",
        version="0",
        wheel_bytes=1,
        wheel_sha256="",
        member="none/model.gguf",
        member_bytes=path.stat().st_size,
        member_sha256="",
    )
    monkeypatch.setitem(ALIASES, "tiny", alias)
    cache = tmp_path / "cache"
    target = alias_path("tiny", cache)
    target.parent.mkdir(parents=True)
    path.rename(target)
    return cache


def test_an_alias_wins_over_a_folder_of_its_name(
    tiny_alias: Path, write_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(name="tiny")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("tiny", cache=tiny_alias, offline=True)
    assert (checkpoint.name, checkpoint.source) == ("tiny", "gguf")
    assert open_checkpoint("./tiny", cache=tiny_alias, offline=True).source == "folder"


def test_an_alias_that_was_not_fetched_needs_the_network(tiny_alias: Path) -> None:
    path = alias_path("tiny", tiny_alias)
    path.write_bytes(path.read_bytes()[:-1])  # a file of the wrong size is not the model
    with pytest.raises(CheckpointError, match="firsttoken pull tiny"):
        open_checkpoint("tiny", cache=tiny_alias, offline=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nope", r"no such path.*smollm2.*owner/name.*llama-3\.1-8b"),
        ("", "none of what a model may be"),
        ("a/b/c", "none of what a model may be"),
        ("./nope", "no such file or folder"),
        ("/nope/nope", "no such file or folder"),
        ("~/nope-nope", "no such file or folder"),
        ("owner/nope.gguf", "no such file or folder"),
        ("random:nope", "not a known shape.*qwen3-8b"),
        ("a\0b", "a model"),
        ("x" * 5000, "a model"),
    ],
)
def test_errors_say_what_was_tried(model: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(model, offline=True)
    assert len(str(caught.value)) < 1000


def test_files_that_are_no_models(write_folder: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name its folder"):
        open_checkpoint(str(write_folder() / "model.safetensors"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="never read"):
        open_checkpoint(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-3.1-8b", 8.030),
        ("llama-3.2-1b", 1.236),
        ("llama-3-70b", 70.554),
        ("qwen3-8b", 8.191),
        ("smollm2-135m", 0.1345),
    ],
)
def test_random_shapes_have_the_published_sizes(shape: str, billions: float) -> None:
    checkpoint = open_checkpoint(f"random:{shape}")
    count = sum(info.num_elements for info in checkpoint.tensors.infos().values())
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)
    assert checkpoint.tokenizer is None
    assert checkpoint.source == "random"


@pytest.mark.parametrize("shape", SHAPES)
def test_random_tensors_have_shapes_but_no_bytes(shape: str) -> None:
    checkpoint = open_checkpoint(f"random:{shape}")
    infos = checkpoint.tensors.infos()
    assert {name: info.shape for name, info in infos.items()} == tensor_shapes(checkpoint.config)
    assert all(info.type == "BF16" and info.nbytes == 2 * info.num_elements for info in infos.values())
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*drawn on the device"):
        checkpoint.tensors.data("model.norm.weight")
    family = FAMILIES[checkpoint.config.architecture]
    assert checkpoint.config.qk_norm == family.qk_norm
    assert len({open_checkpoint(f"random:{other}").fingerprint for other in SHAPES}) == len(SHAPES)


def test_a_folder_without_weights_is_a_model_of_random_ones_with_its_own_words(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer_spec(tmp_path)
    checkpoint = open_checkpoint(f"random:{tmp_path}")
    assert (checkpoint.source, checkpoint.path) == ("random", f"random:{tmp_path}")
    assert checkpoint.tokenizer is not None
    assert {name: info.shape for name, info in checkpoint.tensors.infos().items()} == tensor_shapes(checkpoint.config)
    rounded = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}}
    (tmp_path / "config.json").write_text(json.dumps(config | rounded))
    with pytest.raises(CheckpointError, match="leave its quantization_config out"):
        open_checkpoint(f"random:{tmp_path}")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FIRSTTOKEN_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "firsttoken"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "firsttoken"


def test_opening_loads_neither_torch_nor_the_hub(write_gguf: Any) -> None:
    code = (
        "import sys; from firsttoken.checkpoint.locate import open_checkpoint; open_checkpoint(sys.argv[1]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(write_gguf())], check=False).returncode == 0
