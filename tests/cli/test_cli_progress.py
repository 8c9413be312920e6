from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from firsttoken.checkpoint.progress import Progress
from firsttoken.cli import progress
from firsttoken.cli.progress import count_progress, loading, transfer_progress


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def test_loading_is_shown_at_a_terminal_and_gone_afterwards() -> None:
    shown, out = console(terminal=True)
    with loading("[b]odd[/b]", shown):
        end = time.monotonic() + 10
        while "loading [b]odd[/b] ..." not in out.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)
    assert out.getvalue().endswith("\x1b[2K")  # the line was cleared


def test_loading_is_one_line_elsewhere_and_said_before_it_takes_long() -> None:
    shown, out = console(terminal=False)
    with loading("[b]m[/b]", shown):
        assert out.getvalue() == "loading [b]m[/b] ...\n"
    assert out.getvalue() == "loading [b]m[/b] ...\n"


def test_a_transfer_is_plain_lines_elsewhere() -> None:
    shown, out = console(terminal=False)
    with transfer_progress(shown) as update:
        for stage in ("download", "verify"):
            update(Progress(stage, "m.whl", 5_000_000, None))
            update(Progress(stage, "m.whl", 9_000_000, 9_000_000))
    assert out.getvalue() == "download m.whl: 9.0/9.0 MB\nverify m.whl: 9.0/9.0 MB\n"


def test_a_count_is_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out = console(terminal=False)
    with count_progress("answering", 2, shown) as update:
        update(0, "1 tokens")
        update(2, "9 tokens")
    assert out.getvalue() == "answering: 2/2, 9 tokens\n"
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0)
    with count_progress("answering", 2, shown) as update:
        update(1, "5 tokens")
        update(2, "9 tokens")
    assert out.getvalue().splitlines()[1:] == ["answering: 1/2, 5 tokens", "answering: 2/2, 9 tokens"]


def test_a_bar_at_a_terminal_leaves_a_redirected_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    shown, out = console(terminal=True)
    with count_progress("answering", 1, shown) as update:
        print("an answer")
        update(1, "2 tokens")
    assert capsys.readouterr().out == "an answer\n"
    assert "an answer" not in out.getvalue()
    assert "1/1" in out.getvalue()
