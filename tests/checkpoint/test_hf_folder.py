"""A model folder as a checkpoint: tokens, templates, defaults, fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firsttoken.checkpoint.fingerprint import fingerprint_files
from firsttoken.checkpoint.hf_folder import open_folder
from firsttoken.core.errors import CheckpointError


def test_a_bare_folder(write_folder: Any) -> None:
    checkpoint = open_folder(write_folder())
    assert (checkpoint.name, checkpoint.source) == ("tiny", "folder")
    assert checkpoint.tokenizer is None
    assert checkpoint.chat_template is None
    assert checkpoint.generation.eos_token_ids == (2,)
    assert checkpoint.tensors.infos()["model.norm.weight"].type == "F16"


def test_every_end_token_counts(write_folder: Any, tokenizer_json: str) -> None:
    files = {
        "generation_config.json": json.dumps({"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": json.dumps({"eos_token": {"content": "<end>"}, "unk_token": "<unk>"}),
    }
    checkpoint = open_folder(write_folder({"eos_token_id": 7}, files))
    assert checkpoint.generation.eos_token_ids == (5, 6, 7, 2)
    assert (checkpoint.generation.temperature, checkpoint.generation.top_p) == (0.6, 0.9)
    assert checkpoint.generation.top_k == 20
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos_token == "<end>"
    assert checkpoint.tokenizer.unk_token == "<unk>"
    assert checkpoint.tokenizer.special_tokens == ("<unk>", "<end>")
    assert checkpoint.tokenizer.add_bos is None


@pytest.mark.parametrize(("eos", "ids"), [("</s>", (2, 4)), ("<end>", (2,)), ("unheard", (2,)), (None, (2,))])
def test_the_tokenizers_own_end_token_is_looked_up(
    eos: str | None, ids: tuple[int, ...], write_folder: Any, tokenizer_json: str
) -> None:
    files = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": json.dumps({"eos_token": eos})}
    assert open_folder(write_folder(files=files)).generation.eos_token_ids == ids


def test_unigram_vocabularies_are_lists(write_folder: Any) -> None:
    tokenizer = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["x", -1.0], ["y", -2.0], ["</s>", 0]]}}
    files = {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps({"eos_token": "</s>"})}
    assert open_folder(write_folder(files=files)).generation.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": json.dumps({"chat_template": "one"})}, "one"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]}
                )
            },
            "yes",
        ),
        ({"tokenizer_config.json": json.dumps({"chat_template": "no"}), "chat_template.jinja": "żółw"}, "żółw"),
        ({}, None),
    ],
)
def test_chat_template(files: dict[str, str], template: str | None, write_folder: Any) -> None:
    assert open_folder(write_folder(files=files)).chat_template == template


@pytest.mark.parametrize(
    ("config", "files", "place"),
    [
        ({}, {"generation_config.json": '{"eos_token_id": 8}'}, "generation_config.json: eos_token_id: 8 is outside"),
        ({"eos_token_id": "two"}, {}, "config.json: eos_token_id"),
        ({}, {"generation_config.json": "nonsense"}, "generation_config.json: is not the JSON"),
        ({}, {"tokenizer.json": '{"added_tokens": 3}'}, "tokenizer.json: is not the JSON"),
        ({}, {"tokenizer_config.json": '{"chat_template": [{"name": "rag"}]}'}, "chat_template: has no template named"),
        ({}, {"tokenizer_config.json": '{"chat_template": 3}'}, "chat_template: must be a template"),
        ({}, {"tokenizer.json": "{}", "tokenizer_config.json": '{"eos_token": 3}'}, "eos_token: must be a token"),
    ],
)
def test_damage_is_named(config: dict[str, Any], files: dict[str, str], place: str, write_folder: Any) -> None:
    with pytest.raises(CheckpointError, match=place):
        _ = open_folder(write_folder(config, files)).tokenizer


def test_text_is_not_read_before_it_is_asked_for(write_folder: Any) -> None:
    checkpoint = open_folder(write_folder({}, {"tokenizer.json": "damaged"}))
    assert checkpoint.config.num_layers > 0
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = checkpoint.tokenizer


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_folder(tmp_path)


def test_the_fingerprint_follows_the_content_not_the_name(write_folder: Any) -> None:
    folder = write_folder()
    first = open_folder(folder).fingerprint
    assert open_folder(folder, name="other").fingerprint == first
    moved = folder.rename(folder.with_name("moved"))
    assert open_folder(moved).fingerprint == first
    weights = moved / "model.safetensors"
    content, stat = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = open_folder(moved).fingerprint
    assert changed != first
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert open_folder(moved).fingerprint not in (first, changed)


def test_the_fingerprint_samples_large_files(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(16 << 30)  # sparse: takes no disk
    stat = path.stat()
    first = fingerprint_files("test", [path])
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint_files("test", [path]) != first


def test_data_is_a_view(write_folder: Any) -> None:
    data = open_folder(write_folder()).tensors.data("model.embed_tokens.weight")
    assert data.shape == (8, 256)
    assert data.dtype == np.uint8
    assert not data.flags.owndata


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_p", 5), ("top_k", -7), ("min_p", 2.0), ("repetition_penalty", 0.0)],
)
def test_a_default_that_no_request_may_have_is_the_checkpoints_fault(
    write_folder: Any, field: str, value: float
) -> None:
    folder = write_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, field: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {field}: {field} must be") as caught:
        _ = open_folder(folder).generation
    assert caught.value.field == field
