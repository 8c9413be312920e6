from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.cli.main import main
from firsttoken.engine.stub import Fault


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_answered_in_order(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "one", "--prompt", "two"]) == 0
    assert capsys.readouterr().out == "[1] ONE\n[2] TWO\n"


def test_a_single_answer_is_bare(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "some-model", "--prompt", "hello", "--threads", "1"]) == 0
    assert capsys.readouterr().out == "HELLO\n"
    assert (stub.args[0].model, stub.args[0].threads) == ("some-model", 1)


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Stdout from here on (pytest sets its own between fixture and test)."""
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    return screen


class Screen(io.StringIO):
    """A terminal as stdout; ``on_write`` is called with each piece."""

    on_write: Callable[[str], None] = staticmethod(lambda text: None)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.on_write(text)
        return count


def test_a_single_answer_is_streamed_to_a_terminal(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = at_terminal(monkeypatch)
    stub.options = {"step_s": 0.01}
    pieces: list[str] = []
    screen.on_write = pieces.append
    assert main(["generate", "--prompt", "hello\x1b[2J", "--threads", "1", "--max-tokens", "50"]) == 0
    assert screen.getvalue() == "HELLO[2J\n"
    assert len([piece for piece in pieces if piece]) > 3
    assert stub.args[0].threads == 1
    assert stub.requests[0].params.max_tokens == 50
    assert not stub.engines[0].alive()


def test_a_streamed_chat_goes_through_the_template(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = at_terminal(monkeypatch)
    assert main(["generate", "--chat", "--prompt", "hi"]) == 0
    assert screen.getvalue() == "USER:HI\n\n"


def test_several_answers_and_json_are_not_streamed(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = at_terminal(monkeypatch)
    assert main(["generate", "--prompt", "a", "--prompt", "b"]) == 0
    assert main(["generate", "--prompt", "a", "--json"]) == 0
    said = screen.getvalue()
    assert "[1] A\n[2] B\n" in said
    assert '"outputs": [{' in said


def test_ctrl_c_keeps_what_was_streamed(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = at_terminal(monkeypatch)

    def stop(text: str) -> None:
        if "x" in text:
            screen.on_write = lambda _: None
            raise KeyboardInterrupt

    stub.options = {"step_s": 0.002}
    stub.script = lambda request: stub.say("x" * 3000)
    screen.on_write = stop
    assert main(["generate", "--prompt", "a", "--max-tokens", "3000"]) == 130
    assert screen.getvalue().startswith("x")
    assert screen.getvalue().endswith("x\n")
    assert not stub.engines[0].alive()


def test_a_streamed_answer_that_fails(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = at_terminal(monkeypatch)
    stub.script = lambda request: [65, Fault("logits were not finite")]
    assert main(["generate", "--prompt", "a"]) == 1
    assert screen.getvalue() == "A\n"
    assert "prompt 1: " in capsys.readouterr().err
    stub.script = lambda request: [Fault("out of memory", fatal=True)]
    assert main(["generate", "--prompt", "a"]) == 1
    assert "out of memory" in capsys.readouterr().err


def test_chat_goes_through_the_template(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "--prompt", "hi"]) == 0
    assert capsys.readouterr().out.strip() == "USER:HI"


def test_json_is_one_object_with_header(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "ab", "--prompt", "c", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(o["text"], o["token_ids"], o["finish_reason"]) for o in told["outputs"]] == [
        ("AB", [65, 66, stub.EOS], "stop"),
        ("C", [67, stub.EOS], "stop"),
    ]
    assert {"command", "date", "commit", "versions", "device", "model", "dtype", "quantization", "kv_dtype"} <= set(
        told
    )


def test_sampling_flags_reach_the_engine(stub: Any) -> None:
    flags = ["--max-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--seed", "9", "--stop", "Z", "--ignore-eos"]
    assert main(["generate", "--prompt", "abcdef", *flags]) == 0
    params = stub.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (3, 0.5, 4, 9)
    assert params.stops == ("Z",)
    assert stub.EOS not in stub.requests[0].stop_ids


def test_without_flags_greedy_or_the_models_own(stub: Any) -> None:
    assert main(["generate", "--prompt", "a"]) == 0
    assert stub.requests[0].params.temperature == 0
    stub.generation = GenerationConfig(eos_token_ids=(stub.EOS,), temperature=0.6, top_p=0.9)
    assert main(["generate", "--prompt", "a"]) == 0
    assert (stub.requests[1].params.temperature, stub.requests[1].params.top_p) == (0.6, 0.9)


def test_a_file_of_jobs(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "a much longer one", "id": "x"}\n'
        '{"prompt": [104, 105], "max_tokens": 1}\n'
        '{"messages": [{"role": "user", "content": "yo"}], "temperature": 1.5}\n'
        '{"prompt": "b", "n": 2}\n'
    )
    assert main(["generate", "--input", str(source), "--output", str(target), "--max-tokens", "100"]) == 0
    assert capsys.readouterr().out == ""
    done = lines(target)
    assert [(d["prompt_index"], d["index"], d["text"]) for d in done] == [
        (0, 0, "A MUCH LONGER ONE"),
        (1, 0, "H"),
        (2, 0, "USER:YO\n"),
        (3, 0, "B"),
        (3, 1, "B"),
    ]
    assert done[0]["id"] == "x"
    assert done[1]["finish_reason"] == "length"
    assert {r.params.temperature for r in stub.requests} == {0.0, 1.5}


def test_many_jobs_keep_their_order(stub: Any, tmp_path: Path) -> None:
    stub.options = {"max_num_seqs": 4}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # Uneven lengths, so that later jobs end before earlier ones.
    prompts = [f"{'x' * (i * 7 % 23)}{i}" for i in range(60)]
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    assert main(["generate", "--input", str(source), "--output", str(target)]) == 0
    assert [d["text"] for d in lines(target)] == [prompt.upper() for prompt in prompts]


def test_better_classes_are_computed_first_and_answers_keep_their_order(stub: Any, tmp_path: Path) -> None:
    stub.options = {"max_num_seqs": 1}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines_in = [{"prompt": f"line {i}"} for i in range(20)]
    lines_in += [{"prompt": "urgent", "service_class": "p0"}, {"prompt": "soon", "service_class": "p1"}]
    lines_in += [{"prompt": "before the rest", "priority": -1}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines_in))
    assert main(["generate", "--input", str(source), "--output", str(target)]) == 0
    assert [stub.prompt_text(request) for request in stub.requests[:4]] == [
        "urgent",
        "soon",
        "before the rest",
        "line 0",
    ]
    assert [d["text"] for d in lines(target)] == [line["prompt"].upper() for line in lines_in]


def test_a_refused_job_spares_the_others(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": [9999]}\n{"prompt": "b"}\n')
    assert main(["generate", "--input", str(source), "--json"]) == 1
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [o.get("text") for o in outputs] == ["A", None, "B"]
    assert "9999" in outputs[1]["error"]


def test_a_job_that_fails_in_the_engine(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stub.script = lambda request: (
        [Fault("logits were not finite")] if stub.prompt_text(request) == "bad" else stub.say("ok")
    )
    assert main(["generate", "--prompt", "bad", "--prompt", "good"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "[2] ok\n"
    assert "prompt 1: " in shown.err
    assert "not finite" in shown.err


def test_a_dead_engine_ends_with_1(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stub.script = lambda request: [Fault("out of memory", fatal=True)]
    assert main(["generate", "--prompt", "a", "--prompt", "b"]) == 1
    assert "out of memory" in capsys.readouterr().err


def test_an_engine_that_cannot_start(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stub.options = {"fail_start": "no such file"}
    assert main(["generate", "--prompt", "a"]) == 1
    assert "no such file" in capsys.readouterr().err


def test_answers_of_an_earlier_run_are_lost_to_new_ones_only(stub: Any, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("old\n")
    stub.options = {"fail_start": "no such file"}
    assert main(["generate", "--prompt", "a", "--output", str(target)]) == 1
    assert target.read_text() == "old\n"
    stub.options = {}
    assert main(["generate", "--prompt", "a", "--prompt", "b", "--output", str(target)]) == 0
    assert ["text" in json.loads(line) for line in target.read_text().splitlines()] == [True, True]


def test_bad_input_computes_nothing(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    assert main(["generate", "--input", str(source), "--output", str(target)]) == 2
    assert "line 2" in capsys.readouterr().err
    assert not stub.args
    assert not target.exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--input", "missing.jsonl"],
        ["--prompt", "a", "--output", "/no/such/folder/out"],
        ["--prompt", "a", "--top-p", "2"],
        ["--input", "x", "--chat"],
    ],
)
def test_bad_usage(flags: list[str], stub: Any) -> None:
    assert main(["generate", *flags]) == 2
    assert not stub.args


def test_the_engine_is_stopped_at_the_end(stub: Any) -> None:
    assert main(["generate", "--prompt", "a"]) == 0
    assert not stub.engines[0].alive()


def test_the_input_is_never_overwritten(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    again = tmp_path / "again"
    again.symlink_to(prompts)
    assert main(["generate", "--input", str(prompts), "--output", str(again)]) == 2
    assert "is the --input" in capsys.readouterr().err
    assert prompts.read_text() == '{"prompt": "a"}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_without_a_traceback(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a", "--output", "/dev/full"]) == 1
    assert "error: No space left on device" in capsys.readouterr().err
