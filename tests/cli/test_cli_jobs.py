from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.cli.jobs import MAX_SHOWN, Answer, Job, parse_line, read_file, read_jobs
from firsttoken.core.errors import ConfigError
from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.service import ServiceClass, Terms


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ('{"prompt": "Hi"}', Job(prompt="Hi")),
        ('{"prompt": [1, 2]}', Job(prompt=[1, 2])),
        ('{"prompt": ""}', Job(prompt="")),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', Job(messages=[{"role": "user", "content": "Hi"}])),
        ('{"prompt": "Hi", "id": "a", "n": 2, "stop": ["."]}', Job("Hi", fields={"n": 2, "stop": ["."]}, key="a")),
        ('{"prompt": "Hi", "id": 7}', Job("Hi", key=7)),
        (
            '{"prompt": "Hi", "service_class": "p0", "priority": -1}',
            Job("Hi", terms=Terms(service=ServiceClass.P0, priority=-1)),
        ),
        ('{"prompt": "Hi", "logit_bias": {"5": -1}}', Job("Hi", fields={"logit_bias": {5: -1.0}})),
    ],
)
def test_a_line_becomes_a_job(line: str, job: Job) -> None:
    assert parse_line(line.encode(), {}) == job


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "JSON|data"),
        ("nope", "JSON"),
        ("[1]", "object"),
        ("{}", "either"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": [1.5]}', "prompt"),
        ('{"messages": ["x"]}', "messages"),
        ('{"prompt": "a", "id": []}', "id"),
        ('{"prompt": "a", "colour": 1}', "colour.*known are prompt, messages, id, service_class, priority and"),
        ('{"prompt": "a", "service_class": "p5"}', "service_class must be one of p0, p1, p2, got 'p5'"),
        ('{"prompt": "a", "service_class": 0}', "service_class"),
        ('{"prompt": "a", "priority": "high"}', "priority"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "temperature": NaN}', "JSON"),
        ('{"prompt": "a", "max_tokens": -1}', "max_tokens"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias|int"),
    ],
)
def test_a_bad_line_says_why(line: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_line(line.encode(), {})


def test_a_lines_fields_are_checked_together_with_the_defaults() -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        parse_line(b'{"prompt": "a", "min_tokens": 9}', {"max_tokens": 8})


@given(st.binary(max_size=200))
def test_any_bytes_give_a_job_or_a_config_error(raw: bytes) -> None:
    with contextlib.suppress(ConfigError):
        assert read_jobs(raw.splitlines(), "input", {})


def test_deep_nesting_is_a_bad_line() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        read_jobs([b'{"prompt":' + b"[" * 100_000], "input", {})


def test_bad_lines_are_told_by_number(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": 5}\nnope\n')
    with pytest.raises(ConfigError) as told:
        read_file(file, {})
    text = str(told.value)
    assert "2 bad lines" in text
    assert "line 3: " in text
    assert "line 4: " in text
    assert "line 1: " not in text


def test_one_bad_line_is_one() -> None:
    with pytest.raises(ConfigError, match="f: 1 bad line, nothing"):
        read_jobs([b"x"], "f", {})


def test_many_bad_lines_are_told_shortly() -> None:
    with pytest.raises(ConfigError) as told:
        read_jobs([b"x"] * 1000, "input", {})
    assert len(str(told.value).splitlines()) == MAX_SHOWN + 2
    assert f"and {1000 - MAX_SHOWN} more" in str(told.value)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_file(tmp_path / "empty", {})
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "missing", {})


def test_answers_form() -> None:
    plain = Answer(0, text="Hi", token_ids=[1], finish_reason="stop").as_dict()
    assert {"text": "Hi", "token_ids": [1], "finish_reason": "stop"}.items() <= plain.items()
    assert not {"id", "logprobs", "error"} & plain.keys()
    full = Answer(1, 2, "key", logprobs=[TokenLogprobs(-0.5, 1, [4, 5], [-0.5, -1.5])]).as_dict()
    assert (full["prompt_index"], full["index"], full["id"]) == (1, 2, "key")
    assert json.loads(json.dumps(full))["logprobs"] == [{"logprob": -0.5, "rank": 1, "top": {"4": -0.5, "5": -1.5}}]
    failed = Answer(3, error="too long").as_dict()
    assert failed == {"prompt_index": 3, "index": 0, "finish_reason": "error", "error": "too long"}


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault() -> None:
    jobs = read_jobs([b'\xef\xbb\xbf{"prompt": "a"}\r\n', b'{"prompt": "b"}\r\n'], "f", {})
    assert [job.prompt for job in jobs] == ["a", "b"]
