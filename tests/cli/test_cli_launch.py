"""Commands launch their engine first and import later, and refuse first what they would refuse."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from firsttoken.cli.bench_options import run_async, say
from firsttoken.cli.main import main
from firsttoken.core.targets_file import read_targets

# Runs a command up to its engine's launch, and prints what is imported by then.
UP_TO_THE_LAUNCH = """
import json, subprocess, sys
from firsttoken.cli import chat, main

def launch(command, **_):
    assert "firsttoken.engine.process" in command
    print(json.dumps(sorted(sys.modules.keys() - before)))
    sys.stdout.flush()
    sys.exit(0)

before = sys.modules.keys() - {name for name in sys.modules if name.startswith(("firsttoken", "msgspec"))}
subprocess.Popen = launch
# It has to open the model, which takes numpy.
chat._check_can_chat = lambda args: None
main.main(sys.argv[1:])
"""

COMMANDS = [
    ["bench", "latency", "random:tiny-llama"],
    ["bench", "load", "random:tiny-llama", "--rate", "1"],
    ["serve", "random:tiny-llama", "--port", "0"],
    ["generate", "random:tiny-llama", "--prompt", "x"],
    ["generate", "random:tiny-llama", "--prompt", "x", "--json", "--output", "/dev/null"],
    ["chat", "random:tiny-llama"],
]
# Beside the standard library. What is missing here can be imported while the engine starts.
PACKAGES = {"firsttoken", "msgspec", "typing_extensions"}
ROOMS = {"bench", "cli", "core", "engine", "observability", "server", "transport"}
# Large, and not needed to start a process.
HEAVY = {"asyncio", "concurrent", "email", "http", "importlib.metadata", "ssl", "urllib.request", "xml"}


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv[:2]))
def test_little_is_imported_before_the_launch(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UP_TO_THE_LAUNCH, *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    tops = {name.partition(".")[0] for name in loaded}
    assert tops - sys.stdlib_module_names <= PACKAGES
    assert not HEAVY & set(loaded)
    assert {name.split(".")[1] for name in loaded if name.startswith("firsttoken.")} - {"version"} <= ROOMS
    bench = {name for name in loaded if name.startswith("firsttoken.bench.")}
    assert bench <= {"firsttoken.bench.arrivals"}, "only what parses the mix of a load"


TARGETS = str(Path(__file__).parent / "targets.toml")


def test_targets_reach_the_server_and_the_engine(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("firsttoken.server.run.serve", lambda config, *_: served.append(config) or 0)
    assert main(["serve", "--port", "0", "--targets", TARGETS, "--api-key", "dashboard=key", "--api-key", "k=2"]) == 0
    assert stub.args[0].targets == served[0].targets == read_targets(TARGETS)
    assert [(one.name, one.key) for one in served[0].named_keys()] == [("dashboard", "key"), ("", "k=2")]


def test_bad_usage_is_found_before_the_launch(stub: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for argv in (
            ["serve", "--port", str(taken.getsockname()[1])],
            ["serve", "--host", "no.such.host.invalid"],
            ["serve", "--port", "0", "--drain-s", "-1"],
            ["serve", "--port", "0", "--targets", TARGETS],
            ["serve", "--port", "0", "--targets", TARGETS, "--api-key", "dashbord=key"],
            ["bench", "load", "--rate", "0.01", "--seconds", "1"],
            ["generate", "--input", str(tmp_path / "none.jsonl")],
            ["generate", "--prompt", "x", "--output", str(tmp_path / "no" / "folder")],
            ["generate", "--prompt", "x", "--temperature", "-1"],
            ["chat", "--api-key", "k"],
            ["chat", "--url", "http://127.0.0.1:1", "--threads", "2"],
        ):
            assert main(argv) == 2, argv
    assert not stub.args


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_commands_work_where_a_standard_stream_is_closed(
    stub: Any, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setattr(f"sys.{closed}", None)
    assert main(["generate", "--prompt", "x"]) == 0
    assert main(["chat"]) == 0
    assert len(stub.requests) == (1 if closed == "stdin" else 2)
    say("measuring")


def test_a_measurement_is_begun_on_its_loop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before, it would leave a coroutine that nobody waits for, and Python says so on stderr."""
    begun = []

    async def measure(what: str) -> str:
        return what

    def work(what: str) -> Coroutine[Any, Any, str]:
        begun.append(what)
        return measure(what)

    assert run_async(work, "latency") == "latency"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(ImportError):
        run_async(work, "load")
    assert begun == ["latency"]
