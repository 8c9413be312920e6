"""How vectors are made, from the files of sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from firsttoken.checkpoint.pooling import choose_pooling
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.core.pooling import Pooling

TYPES = "sentence_transformers.models."


@dataclass
class Folder:
    path: str


@pytest.fixture
def folder(tmp_path):
    """``folder(pooling config, names of modules)``."""

    def make(config, *modules, path="1_Pooling"):
        listed = [
            {"idx": index, "name": str(index), "path": path if name == "Pooling" else "", "type": TYPES + name}
            for index, name in enumerate(modules)
        ]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        if config is not None:
            (tmp_path / "1_Pooling").mkdir()
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        return Folder(str(tmp_path))

    return make


MEAN = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


@pytest.mark.parametrize(
    ("config", "modules", "expected"),
    [
        (MEAN, ("Transformer", "Pooling", "Normalize"), Pooling("mean")),
        (LAST, ("Transformer", "Pooling"), Pooling("last", normalize=False)),
        ({"pooling_mode": "lasttoken"}, ("Transformer", "Pooling", "Normalize"), Pooling("last")),
    ],
)
def test_the_folder_says_how(folder, config, modules, expected):
    assert choose_pooling("auto", folder(config, *modules)) == expected


def test_without_its_files_it_is_the_last_token_and_what_is_asked_for_counts(tmp_path, folder):
    assert choose_pooling("auto", Folder(str(tmp_path))) == Pooling("last", normalize=True)
    assert choose_pooling("auto", Folder("random:tiny-llama")) == Pooling()
    assert choose_pooling("mean", folder({"pooling_mode_cls_token": True}, "Transformer", "Pooling")) == Pooling("mean")
    with pytest.raises(ConfigError, match="auto, mean or last, got 'cls'"):
        choose_pooling("cls", Folder(str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "modules", "path", "said"),
    [
        ({"pooling_mode_cls_token": True}, ("Transformer", "Pooling"), "1_Pooling", "pooling_mode_cls_token"),
        ({**MEAN, **LAST}, ("Transformer", "Pooling"), "1_Pooling", "mean_tokens and pooling_mode_lasttoken"),
        (MEAN, ("Transformer", "Pooling", "Dense"), "1_Pooling", "Dense is not computed"),
        (None, ("Transformer", "Pooling"), "1_Pooling", "there is no 1_Pooling/config.json"),
        (MEAN, ("Transformer", "Pooling"), "../..", "outside"),
        (MEAN, ("Transformer",), "1_Pooling", "no Pooling module"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_way_out(folder, config, modules, path, said):
    with pytest.raises(CheckpointError, match=said):
        choose_pooling("auto", folder(config, *modules, path=path))
