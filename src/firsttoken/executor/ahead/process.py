"""The process that compiles for an engine: ``python -m firsttoken.executor.ahead.process``, started by `client`.

It reads one `Order` from its standard input, forks workers, and writes `Progress` lines to its standard output. It ends
when all is compiled, or when its standard input ends: then whoever wanted the kernels is gone, however that happened.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from firsttoken.executor.ahead.jobs import Rehearsal, survey
from firsttoken.executor.ahead.messages import Order, Progress, Report
from firsttoken.executor.ahead.plan import Key
from firsttoken.executor.ahead.workers import Workers

_STDIN, _STDOUT = 0, 1
_MOST_NAMED = 8


class Foreman:
    """Keeps count of what workers have done, and tells each change by ``say``."""

    def __init__(self, say: Callable[[Progress], None]) -> None:
        self._say = say
        self._done: set[int] = set()
        self._row = 0  # jobs below are all done
        self._needed: list[int] = []
        self._ready = 0
        self._total = 0
        self.failed: list[str] = []
        self._said: Progress | None = None

    def need(self, jobs: int) -> None:
        """The next key needs the first ``jobs``."""
        self._needed.append(jobs)
        self._count()

    def expect(self, total: int) -> None:
        self._total = total
        self._count()

    def hear(self, report: Report) -> None:
        self._done.add(report.job)
        if report.error is not None and len(self.failed) < _MOST_NAMED:
            self.failed.append(report.error)
        self._count()

    def check(self) -> None:
        """All workers have ended: what they left undone has failed."""
        missing = self._total - len(self._done)
        if missing > 0:
            self.failed.append(f"{missing} of {self._total} were left undone: a compiling process has died")

    def finish(self) -> None:
        self._tell(finished=True)

    def _count(self) -> None:
        while self._row in self._done:
            self._row += 1
        while self._ready < len(self._needed) and self._needed[self._ready] <= self._row:
            self._ready += 1
        self._tell(finished=False)

    def _tell(self, *, finished: bool) -> None:
        progress = Progress(
            ready=self._ready, done=len(self._done), total=self._total, failed=list(self.failed), finished=finished
        )
        if progress != self._said:
            self._said = progress
            self._say(progress)


def supervise(
    executor: Rehearsal, keys: Sequence[Key], workers: Workers, foreman: Foreman, gone: Callable[[], bool]
) -> bool:
    """True when all workers have ended, False when ``gone`` (asked often) says that nobody waits any more."""
    reader = _Lines(workers.reports)

    def attend(wait_s: float) -> None:
        select.select([workers.reports, _STDIN], [], [], wait_s)
        for line in reader.read():
            foreman.hear(msgspec.json.decode(line, type=Report))

    def met(jobs: int) -> None:
        foreman.need(jobs)
        attend(0)

    foreman.expect(survey(executor, keys, met))
    while not reader.ended:
        attend(1.0)
        if gone():
            return False
    foreman.check()
    return True


class _Lines:
    """Whole lines from a pipe, as they come."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.ended = False
        os.set_blocking(fd, False)

    def read(self) -> list[bytes]:
        while not self.ended:
            try:
                got = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            self.ended = not got
            self._rest += got
        *lines, self._rest = self._rest.split(b"\n")
        return lines


def _read_order() -> Order | None:
    """None when standard input ends before a whole line came."""
    raw = b""
    while not raw.endswith(b"\n"):
        got = os.read(_STDIN, 1 << 16)
        if not got:
            return None
        raw += got
    return msgspec.json.decode(raw, type=Order)


def _gone() -> bool:
    readable, _, _ = select.select([_STDIN], [], [], 0)
    return bool(readable) and not os.read(_STDIN, 1 << 10)


def main() -> int:
    """0 when the order was carried out or nobody waits for it."""
    # The engine decides when this ends; a Ctrl-C sent to the whole group must not leave half a report.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imported before the order is there, and before workers are forked: while the engine imports its own.
    from triton.runtime.cache import triton_key

    from firsttoken.executor.ahead.marks import mark_done
    from firsttoken.executor.ahead.outline import outline
    from firsttoken.executor.ahead.plan import all_keys, urgent_keys
    from firsttoken.executor.ahead.target import compile_for

    triton_key()
    order = _read_order()
    if order is None:
        return 0
    compile_for(order.gpu.capability)
    executor = outline(order)
    keys = all_keys(executor.table)
    urgent = len(urgent_keys(executor.table)) if order.quietly else len(keys)
    workers = Workers(executor, keys, order.processes, urgent)
    foreman = Foreman(_say)
    try:
        if supervise(executor, keys, workers, foreman, _gone) and not foreman.failed:
            mark_done(order)
    finally:
        workers.stop()
    foreman.finish()
    return 0


def _say(progress: Progress) -> None:
    os.write(_STDOUT, msgspec.json.encode(progress) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
