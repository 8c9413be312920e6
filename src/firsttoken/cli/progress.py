"""Progress on stderr, by rich. On anything but a terminal only the last state is written, as one line."""

from __future__ import annotations

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

from firsttoken.checkpoint.progress import OnProgress
from firsttoken.checkpoint.progress import Progress as Report

_WORDS = TextColumn("{task.description}")


@contextmanager
def transfer_progress(console: Console | None = None) -> Iterator[OnProgress]:
    """Yields what takes `checkpoint.progress.Progress` reports: a bar a stage, which appears with its first report
    (a cached file shows none)."""
    columns = (_WORDS, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console or Console(stderr=True))
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
    columns = (_WORDS, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console or Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, note="")

        def update(done: int, note: str) -> None:
            progress.update(task, completed=done, note=note)

        yield update
