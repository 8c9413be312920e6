"""The head of every result object: what was run, when, by which code, on what."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from firsttoken.core.engine_args import EngineArgs
from firsttoken.transport.messages import EngineInfo
from firsttoken.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "msgspec", "starlette", "uvicorn", "rich")


def versions(*more: str) -> dict[str, str]:
    """Versions of Python, firsttoken and the installed packages that matter, ``more`` added. Imports none of them."""
    found = {"python": platform.python_version(), "firsttoken": __version__}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source tree that this code runs from (``+changes`` when it was edited), None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(  # noqa: S603  # fixed words, no shell
        ["git", "-C", str(root), *words],  # noqa: S607  # the user's own git
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
    )
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def header(source: EngineArgs | EngineInfo | None = None, *, command: str | None = None, **more: Any) -> dict[str, Any]:
    """``command, date, commit, versions`` and, from the engine's own info, ``device, model, dtype, quantization,
    kv_dtype``; ``more`` (batch, input, output, seed, ...) follows. ``command`` defaults to this process's own.
    """
    head: dict[str, Any] = {
        "command": command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
    }
    if source is not None:
        for name in ("device", "model", "dtype", "quantization", "kv_dtype"):
            head[name] = getattr(source, name)
        if head["device"] == "cpu":
            head["device_name"] = cpu_name()
        elif device_name := getattr(source, "device_name", ""):
            head["device_name"] = device_name
    return {**head, **more}
