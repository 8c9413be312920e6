from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from firsttoken.checkpoint import pull as checkpoint_pull
from firsttoken.cli import main as cli
from firsttoken.cli import report
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import CheckpointError, ConfigError, InvalidRequest
from firsttoken.core.meant import meant
from firsttoken.core.vllm_options import VLLM_OPTIONS
from firsttoken.version import __version__
from tests.diagnose.double import listening


def children_s() -> float:
    """CPU time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.clock
def test_help_is_quick_and_loads_no_engine() -> None:
    code = (
        "import sys\nfrom firsttoken.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'asyncio', 'starlette', 'tokenizers', 'rich'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    took = []
    for _ in range(3):
        began = children_s()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        took.append(children_s() - began)
        assert done.returncode == 0, done.stderr
        assert "serve" in done.stdout
    # About 0.1 s of a core; the bound leaves room for one that others keep slow and none for importing torch.
    assert min(took) < 0.5


@pytest.mark.parametrize("command", [command.NAME for command in cli.COMMANDS])
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: firsttoken {command}" in text
    assert max(map(len, text.splitlines())) <= 118


@pytest.mark.parametrize("argv", [[], ["fly"], ["generate"], ["generate", "--prompt", "x", "--input", "y"]])
def test_bad_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("argv", "usage", "message"),
    [
        (["serve", "m", "--prot"], "usage: firsttoken serve [MODEL] [options]", "unrecognized arguments: --prot"),
        (["serve", "--port", "x"], "usage: firsttoken serve [MODEL] [options]", "'x' is not a whole number"),
        (["version", "x"], "usage: firsttoken version [options]", "unrecognized arguments: x"),
        (["fly"], "usage: firsttoken COMMAND [options]", "invalid choice: 'fly'"),
        (["sevre"], "usage: firsttoken COMMAND [options]", "; did you mean serve?"),
        (["serve", "--flight-dri=x"], "usage: firsttoken serve [MODEL] [options]", "; did you mean --flight-dir?"),
        (
            ["quantize", "m", "--out", "x", "--scheme", "int3"],
            "usage: firsttoken quantize [MODEL] [options]",
            "; did you mean int4?",
        ),
        (
            ["serve", "m", "--gpu-memory-utilization", "0.9"],
            "usage: firsttoken serve [MODEL] [options]",
            "--gpu-memory-utilization 0.9 (vLLM's option: --kv-memory SIZE is",
        ),
        (
            ["serve", "m", "-tp", "2"],
            "usage: firsttoken serve [MODEL] [options]",
            "-tp 2 (vLLM's option: one GPU is used)",
        ),
        (["bench", "lod"], "usage: firsttoken bench WHAT [options]", "; did you mean load?"),
        (
            ["bench", "load", "--rate", "3", "--tagrets", "x"],
            "usage: firsttoken bench load [MODEL] [options]",
            "did you mean --targets?",
        ),
        (["simulate", "cache", "--jsno"], "usage: firsttoken simulate cache [options]", "; did you mean --json?"),
        (
            ["serve", "--kv-eviction", "lur"],
            "usage: firsttoken serve [MODEL] [options]",
            "'lur' is no eviction policy: known are default",
        ),
        (
            ["serve", "--batch-window", "soon"],
            "usage: firsttoken serve [MODEL] [options]",
            "'soon' is no batch window: give a time",
        ),
        (
            ["top", "http://x", "--interval", "0"],
            "usage: firsttoken top URL [options]",
            "'0' is not a time from 100ms to 10s",
        ),
        (
            ["top", "http://x", "--interval", "11s"],
            "usage: firsttoken top URL [options]",
            "must be from 100ms to 10s, got '11s'",
        ),
    ],
)
def test_bad_usage_is_two_lines(argv: list[str], usage: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(argv)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{usage}; all options: firsttoken")
    assert message in second


def test_a_word_that_resembles_nothing_is_not_said_to_be_meant() -> None:
    assert meant("--version", ["--kv-eviction", "--port"]) == ""
    assert meant("--kv-evicton", ["--kv-eviction", "--port"]) == "; did you mean --kv-eviction?"


def test_options_of_vllm_that_are_told_of_are_not_options_here_and_stand_in_the_docs() -> None:
    serve_parser = cli.build_parser().parse_args(["serve"]).parser
    flags = {flag.lstrip("-") for action in serve_parser._actions for flag in action.option_strings}
    assert not flags & VLLM_OPTIONS.keys()
    page = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    assert [name for name in VLLM_OPTIONS if f"`--{name}`" not in page and f"`-{name}`" not in page] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("port 99999 is too high"), 2),
        (InvalidRequest("top_p must be at most 1"), 2),
        (CheckpointError("cut short", file="m.gguf"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint_pull, "pull", fail)
    assert cli.main(["pull"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert str(error) in shown.err
    assert "Traceback" not in shown.err


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint_pull, "pull", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["pull"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["serve", "--kv-disk", "x"],
            "--kv-disk 'x' needs host memory that its files pass through: give --kv-host-memory",
        ),
        (["serve", "--kv-disk-size", "1GiB"], "--kv-disk-size of 1024 MiB is for the files in --kv-disk, which is not"),
        (["serve", "--kv-host-memory", "1GiB", "--no-prefix-caching"], "found again, and --prefix-caching is off"),
        (["serve", "--otlp-endpoint", "x"], "--otlp-endpoint must be a URL"),
        (["serve", "--flight-dir", "/dev/null/x"], "--flight-dir: cannot write to /dev/null/x: Not a directory; name"),
        (["bench", "load", "127.0.0.1:8000", "--rate", "1"], "did you mean http://127.0.0.1:8000?"),
        (["chat", "--url", "localhost:8000/v1"], "did you mean http://localhost:8000/v1?"),
        (["top", "localhost:8000"], "did you mean http://localhost:8000?"),
    ],
)
def test_usage_errors_are_told_at_once_and_by_the_flags_names(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(argv) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "kv_" not in shown


def test_a_usual_flight_folder_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(["serve", "--kv-disk", "x"]) == 2  # it came that far
    assert "cannot write to /dev/null/firsttoken/flights: Not a directory, so nothing will be kept" in (
        capsys.readouterr().err
    )


def test_https_where_there_is_no_tls(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with listening(answer) as port:
        url = f"https://127.0.0.1:{port}"
        for argv in (["top", url], ["chat", "--url", url], ["bench", "load", url, "--rate", "1"], ["diagnose", url]):
            assert cli.main(argv) == 1
            assert "does not speak TLS (https)" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_version_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"command", "date", "commit", "versions"} <= told.keys()
    assert told["versions"]["firsttoken"] == __version__
    assert told["versions"]["torch"]


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = (
        "import sys\nfrom firsttoken.cli import main, version\n"
        "version.run = lambda options: print('x' * 2_000_000, flush=True) or 0\n"
        "sys.exit(main.main(['version']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(30) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_header_tells_the_engines_values() -> None:
    head = report.header(EngineArgs(model="m", device="cpu"), command="bench", batch=8)
    assert head["command"] == "bench"
    assert (head["model"], head["device"], head["dtype"], head["quantization"]) == ("m", "cpu", "auto", "auto")
    assert head["device_name"]
    assert head["batch"] == 8


def test_commit_is_none_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(report, "__file__", f"{tmp_path}/a/b/c/report.py")
    assert report.commit() is None
