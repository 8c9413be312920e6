"""Progress on stderr: bars by rich at a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from firsttoken.checkpoint.progress import OnProgress
from firsttoken.checkpoint.progress import Progress as Report
from firsttoken.cli.streams import is_terminal

# Between the plain lines of one stage.
_LINE_EVERY_S = 10.0
_WORDS = TextColumn("{task.description}")


@contextmanager
def loading(model: str, console: Console | None = None) -> Iterator[None]:
    """Says that ``model`` is being loaded: at a terminal until the block ends, elsewhere in a line."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        console.file.write(f"loading {model} ...\n")
        console.file.flush()
        yield
        return
    with console.status(Text(f"loading {model} ...")):
        yield


@contextmanager
def transfer_progress(console: Console | None = None) -> Iterator[OnProgress]:
    """Yields what takes `checkpoint.progress.Progress` reports: a bar a stage, which appears with its first report
    (a cached file shows none)."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        with _lines(console) as write:

            def tell(report: Report) -> None:
                total = "" if report.total is None else f"/{report.total / 1e6:.1f}"
                write(f"{report.stage} {report.name}", f"{report.done / 1e6:.1f}{total} MB")

            yield tell
        return
    columns = (_WORDS, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console, redirect_stdout=is_terminal(sys.stdout))
    tasks: dict[tuple[str, str], TaskID] = {}

    def update(report: Report) -> None:
        key = (report.stage, report.name)
        if key not in tasks:
            tasks[key] = progress.add_task(f"{report.stage} {report.name}", total=report.total)
            progress.start()
        progress.update(tasks[key], completed=report.done, total=report.total)

    try:
        yield update
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def count_progress(title: str, total: int, console: Console | None = None) -> Iterator[Callable[[int, str], None]]:
    """Yields ``update(done, note)``: so many of ``total``, and words behind the bar."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        with _lines(console) as write:
            yield lambda done, note: write(title, f"{done}/{total}, {note}")
        return
    columns = (_WORDS, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    # Answers on stdout pass by the bar only where both share the terminal: into a file they must go as they are.
    with Progress(*columns, console=console, redirect_stdout=is_terminal(sys.stdout)) as progress:
        task = progress.add_task(title, total=total, note="")

        def update(done: int, note: str) -> None:
            progress.update(task, completed=done, note=note)

        yield update


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[str, str], None]]:
    """Yields ``write(stage, state)``: a line now and then, and each stage's last state when the next begins."""
    stage, state, written = "", "", time.monotonic()

    def flush() -> None:
        nonlocal state, written
        if state:
            console.file.write(f"{stage}: {state}\n")
            console.file.flush()
        state, written = "", time.monotonic()

    def write(new_stage: str, new_state: str) -> None:
        nonlocal stage, state
        if new_stage != stage:
            flush()
        stage, state = new_stage, new_state
        if time.monotonic() - written >= _LINE_EVERY_S:
            flush()

    try:
        yield write
    finally:
        flush()
