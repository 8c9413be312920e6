"""What an answer must look like, by the options of ``firsttoken generate`` and by its input's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.cli.main import main
from firsttoken.core.grammar import Grammar
from firsttoken.core.request import EngineRequest

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
LARK = 'start: "yes" | "no"'


def asked(stub: Any, *options: str) -> list[EngineRequest]:
    assert main(["generate", *options]) == 0
    return list(stub.requests)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "answer.lark").write_text(LARK)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        (["--json-schema", SCHEMA], Grammar("json_schema", SCHEMA)),
        (["--json-schema", "schema.json"], Grammar("json_schema", SCHEMA)),
        (["--regex", "[0-9]{4}"], Grammar("regex", "[0-9]{4}")),
        (["--choice", "yes", "--choice", "no"], Grammar("choice", '["yes","no"]')),
        (["--grammar", "answer.lark"], Grammar("lark", LARK)),
    ],
)
def test_the_engine_is_asked_for_it(stub: Any, files: Path, options: list[str], grammar: Grammar) -> None:
    options = [str(files / one) if one in ("schema.json", "answer.lark") else one for one in options]
    [request] = asked(stub, "--prompt", "one", *options)
    assert request.params.grammar == grammar


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json-schema", "nowhere.json"], "--json-schema: cannot read nowhere.json"),
        (["--json-schema", '{"uniqueItems": true, "type": "array"}'], "--json-schema: this JSON schema cannot be used"),
        (["--regex", "("], "--regex: this regular expression cannot be used"),
        (["--choice", ""], "--choice: this choice cannot be used"),
        (["--grammar", "nowhere.lark"], "--grammar: cannot read nowhere.lark"),
        (["--regex", ""], "--regex: grammar: kind regex needs a source"),
    ],
)
def test_what_cannot_be_used_is_said_before_a_model_is_loaded(
    stub: Any, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main(["generate", "--prompt", "one", *options]) != 0
    assert says in capsys.readouterr().err
    assert not stub.args


def test_they_are_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--prompt", "one", "--regex", "a", "--choice", "b"])
    assert "not allowed with argument --regex" in capsys.readouterr().err


def test_a_line_has_its_own_over_that_of_all(stub: Any, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "structured_outputs": {"json": json.loads(SCHEMA)}},
        {"prompt": "c", "grammar": ["json_object"]},
        {"prompt": "d", "grammar": None},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked(stub, "--input", str(tmp_path / "in.jsonl"), "--regex", "[0-9]+")
    found = {stub.prompt_text(one): one.params.grammar for one in stub.requests}
    assert found["a"] == Grammar("regex", "[0-9]+")
    assert found["b"] is not None
    assert json.loads(found["b"].source) == json.loads(SCHEMA)
    assert found["c"] == Grammar("json_object")
    assert found["d"] is None


def test_a_line_that_names_what_is_not_known_is_refused(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "structured_outputs": {"structural_tag": "x"}}\n')
    assert main(["generate", "--input", str(tmp_path / "in.jsonl")]) != 0
    assert "structural_tag" in capsys.readouterr().err
