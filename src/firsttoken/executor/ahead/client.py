"""The engine's side of compiling ahead: starts the process, gives it an order, knows what is ready. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

import msgspec

from firsttoken.executor.ahead.messages import Order, Progress

log = logging.getLogger(__name__)

# Each worker compiles one kernel at a time; more of them than kernels of the first answer gain nothing.
MAX_PROCESSES = 16
# One thread each: the work is Triton's, and a fork must find no other threads.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def spare_processes() -> int:
    """As many as there are processors, less one for who waits for the kernels."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_PROCESSES, cores - 1))


# -P: else a file of the working directory that is called as a module would be taken for it.
_COMMAND = (sys.executable, "-P", "-m", "firsttoken.executor.ahead.process")


class AheadCompiler:
    """The process that compiles (``command``). It imports what it needs from its start on; `order` sets it to work."""

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - no shell, words of our own
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _ENVIRONMENT
        )
        self._rest = b""
        self.progress = Progress(ready=0, done=0, total=0, failed=[], finished=False)
        self.alive = True

    def order(self, order: Order) -> None:
        """What to compile; to be called once."""
        stdin = self._pipe(self._process.stdin)
        try:
            stdin.write(msgspec.json.encode(order) + b"\n")
            stdin.flush()
        except OSError:
            self._lost()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Take in what it has said, waiting for the first word if need be; True when there was something."""
        if not self.alive:
            return False
        stdout = self._pipe(self._process.stdout)
        readable, _, _ = select.select([stdout], [], [], wait_s)
        if not readable:
            return False
        got = os.read(stdout.fileno(), 1 << 16)
        if not got:
            self._lost()
            return False
        *lines, self._rest = (self._rest + got).split(b"\n")
        try:
            if lines:
                self.progress = msgspec.json.decode(lines[-1], type=Progress)
        except msgspec.DecodeError:
            # A library printed something; the next line brings all that this one would have.
            log.debug("not progress: %r", lines[-1])
        if self.progress.finished:
            self.close()
        return True

    def wait_ready(self, entries: int, timeout_s: float) -> bool:
        """Wait until the first ``entries`` of the plan have their kernels; False when that will not be."""
        deadline = time.monotonic() + timeout_s
        while self.progress.ready < entries:
            left = deadline - time.monotonic()
            if left <= 0 or not self.alive:
                return False
            self.poll(min(left, 1.0))
        return True

    def close(self) -> None:
        """End the process, if it has not ended by itself, and with it those that it started."""
        self.alive = False
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if not self.progress.finished:
            self._process.kill()
        self._process.wait()

    def _lost(self) -> None:
        self.close()
        log.warning("the process that compiles kernels ahead has ended early: they are compiled when they are needed")

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "both pipes were asked for"
        return pipe
