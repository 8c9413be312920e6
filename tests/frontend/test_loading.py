"""What the front end takes from a model's files, and from an operator's in their place."""

from __future__ import annotations

import pytest

from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.frontend.loading import load_text
from tests.support.tiny_folder import write_tiny_folder

MESSAGES = [{"role": "user", "content": "hi"}]


def test_an_operators_chat_template_takes_the_place_of_the_models(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    assert load_text(EngineArgs(model=str(folder))).chat_template is None
    (folder / "chat_template.jinja").write_text("the model's")
    assert load_text(EngineArgs(model=str(folder))).chat_template.render(MESSAGES) == "the model's"
    given = tmp_path / "given.jinja"
    given.write_text("{% for m in messages %}<{{ m.role }}>{% endfor %}", encoding="utf-8")
    args = EngineArgs(model=str(folder), chat_template=str(given))
    assert load_text(args).chat_template.render(MESSAGES) == "<user>"
    given.write_text("{% for %}")
    with pytest.raises(CheckpointError, match=r"given\.jinja.*the template cannot be used"):
        load_text(args)


def test_a_chat_template_that_cannot_be_read_is_named(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    missing, rubbish = tmp_path / "missing.jinja", tmp_path / "rubbish.jinja"
    rubbish.write_bytes(b"\xff\xfe")
    for path, why in ((missing, "No such file"), (tmp_path, "Is a directory"), (rubbish, "utf-8")):
        with pytest.raises(ConfigError, match=f"cannot read --chat-template .*{path.name}: .*{why}"):
            load_text(EngineArgs(model=str(folder), chat_template=str(path)))
