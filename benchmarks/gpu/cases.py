"""Commands that measure, one after the other, each in processes of its own that end at its limit.

Words of a case are filled in: ``{out}`` is the file that its result goes to, ``{dir}`` the folder of all results; who
runs cases says what other names mean.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A figure in a result: ``path`` into its JSON, and what to reach; lower is better unless ``more``."""

    path: str
    reach: float
    more: bool = False


@dataclass(frozen=True)
class Case:
    """``words`` follow ``python -m``; ``limit_s`` is far above what the command takes. ``needs``: files without which
    it cannot run. ``result``: where the command itself leaves its result, if it isn't told. ``small`` are more words
    that let it run without a GPU, in seconds; None where there are none."""

    name: str
    words: tuple[str, ...]
    limit_s: int
    targets: tuple[Target, ...] = ()
    needs: tuple[str, ...] = ()
    result: str = "{out}"
    small: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """``problem`` is None where the command ended with 0."""

    seconds: float
    problem: str | None


class Places:
    """What the words of cases stand for."""

    def __init__(self, folder: Path, **names: str) -> None:
        self.folder = folder
        self._names = {"dir": str(folder), **names}

    def output(self, case: Case) -> Path:
        return self.folder / f"{case.name}.json"

    def fill(self, case: Case, word: str) -> str:
        names = {**self._names, "out": str(self.output(case))}
        for name, value in names.items():
            word = word.replace("{" + name + "}", value)
        return word

    def command(self, case: Case, small: bool = False) -> list[str]:
        words = (*case.words, *((case.small or ()) if small else ()))
        return [sys.executable, "-m", *(self.fill(case, word) for word in words)]

    def missing(self, case: Case) -> list[str]:
        """Paths that the case needs and that are not there; a name without a folder may be a model's."""
        paths = [self.fill(case, word) for word in case.needs]
        return [path for path in paths if not path or ("/" in path and not Path(path).exists())]


def run(case: Case, places: Places, *, small: bool = False) -> Outcome:
    """What it says is kept in its ``.log`` where it fails; its result as ``NAME.json`` in any case."""
    log = places.folder / f"{case.name}.log"
    began = time.monotonic()
    with log.open("wb") as said:
        # A group of its own: what it started must not hold the GPU when it is over its limit.
        process = subprocess.Popen(places.command(case, small), stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(case.limit_s)
            problem = None if code == 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {case.limit_s} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if problem is None:
        log.unlink()
    made, kept = Path(places.fill(case, case.result)), places.output(case)
    if made != kept and made.is_file():
        shutil.copyfile(made, kept)
    return Outcome(round(time.monotonic() - began, 1), problem)


def figure(result: dict[str, Any], path: str) -> float | None:
    """The number at a dotted path, where a number stands for a place in a list; None where there is none."""
    value: Any = result
    for key in path.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def verdicts(case: Case, places: Places) -> list[str]:
    """A line for each target, once there is a result."""
    target = places.output(case)
    if not case.targets or not target.exists():
        return []
    result = json.loads(target.read_text())
    lines = []
    for each in case.targets:
        value = figure(result, each.path)
        reached = value is not None and (value >= each.reach if each.more else value <= each.reach)
        word = "reached" if reached else "MISSED"
        lines.append(f"{each.path} = {value if value is None else round(value, 3)} ({each.reach}: {word})")
    return lines
