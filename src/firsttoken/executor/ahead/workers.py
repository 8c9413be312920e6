"""The processes that compile: forks of one that has everything imported, and no GPU or threads of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Sequence

import msgspec

from firsttoken.executor.ahead.jobs import Jobs, Rehearsal
from firsttoken.executor.ahead.messages import MAX_LINE, Report
from firsttoken.executor.ahead.plan import Key

_TICKET = struct.Struct("<I")
# All are written before the first is drawn, and a pipe holds 64 KiB. A model has a hundred or two.
_MAX_JOBS = 8192
_LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1


class Workers:
    """``processes`` forks that share the jobs of ``keys``. Once the first ``urgent`` keys are dealt with they take only
    what no one else wants of the processors. `reports` is the pipe to read `Report` lines from; it ends when all are
    gone."""

    def __init__(self, executor: Rehearsal, keys: Sequence[Key], processes: int, urgent: int) -> None:
        tickets, fill = os.pipe()
        os.write(fill, b"".join(_TICKET.pack(job) for job in range(_MAX_JOBS)))
        os.close(fill)
        self.reports, tell = os.pipe()
        parent = os.getpid()
        self._pids = [
            _fork(lambda: _work(executor, keys, urgent, tickets, tell, parent), (self.reports,))
            for _ in range(processes)
        ]
        os.close(tickets)
        os.close(tell)

    def stop(self) -> None:
        """End those that are still there, and wait for all."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids = []


def _fork(work: Callable[[], None], not_theirs: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for fd in not_theirs:
            os.close(fd)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Nothing of the parent's is to be flushed or ended a second time here.
        os._exit(status)


def _work(executor: Rehearsal, keys: Sequence[Key], urgent: int, tickets: int, reports: int, parent: int) -> None:
    _die_with(parent)

    def draw() -> int | None:
        raw = os.read(tickets, _TICKET.size)
        return int(_TICKET.unpack(raw)[0]) if len(raw) == _TICKET.size else None

    def tell(report: Report) -> None:
        short = msgspec.structs.replace(report, error=report.error and report.error[: MAX_LINE // 4])
        os.write(reports, msgspec.json.encode(short) + b"\n")

    jobs = Jobs(draw, tell)
    jobs.begin()
    for index, key in enumerate(keys):
        if index == urgent:
            os.nice(_LOWEST_PRIORITY)
        if jobs.exhausted:
            return
        jobs.walk(executor, key)


def _die_with(parent: int) -> None:
    """End when the parent does, also by a signal that it cannot catch (Linux; elsewhere its pipes ending is all)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
