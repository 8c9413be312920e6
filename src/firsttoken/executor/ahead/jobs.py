"""Finds what steps need compiled, in an order that is the same in every process, and compiles the part that is its own.

All processes walk through the same keys. Each kernel or launcher met for the first time is the next *job*, so that a
number names it everywhere. Tickets (the numbers from 0) are drawn by the processes from one source: who draws a job's
ticket compiles it, and draws again. So no job is done twice or waits for a busy process, and nothing but numbers has to
be passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from triton import knobs

from firsttoken.executor.ahead import launchers
from firsttoken.executor.ahead.messages import Report
from firsttoken.executor.ahead.plan import Key

Draw = Callable[[], int | None]
"""The next ticket, larger than any that this process has drawn; None when there are no more."""


class Rehearsal(Protocol):
    """What of an executor is needed: launching all that steps of a key may launch, on the meta device."""

    def rehearse(self, key: Key) -> None: ...


class Jobs:
    """Counts jobs, and does those whose tickets ``draw`` gives; ``tell`` hears of each that was done.

    One at a time in a process: it sets Triton's hooks.
    """

    def __init__(self, draw: Draw, tell: Callable[[Report], None]) -> None:
        self.count = 0
        self._draw = draw
        self._tell = tell
        self._ticket = draw()
        self._launchers: set[str] = set()
        self._kernels: set[tuple[str, str, str]] = set()
        self._compiling = False
        knobs.runtime.jit_cache_hook = self._found
        knobs.runtime.jit_post_compile_hook = self._compiled

    @property
    def exhausted(self) -> bool:
        """There are no more tickets, so nothing is left to do here."""
        return self._ticket is None

    def begin(self) -> None:
        """The job before any key's."""
        self._do(launchers.build_driver)

    def walk(self, executor: Rehearsal, key: Key) -> None:
        """Do this process's part of a key's jobs. A job that fails is reported, and the others done."""
        while True:
            try:
                executor.rehearse(key)
                return
            except Exception as error:
                if not self._compiling:
                    raise
                self._end(error)

    # ------------------------------------------------------------------ hooks

    def _found(self, *, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Triton is about to compile a kernel; True leaves it out."""
        name = (fn.module, fn.name, key)
        if name not in self._kernels:
            self._kernels.add(name)
            self._find_launcher(compile["signature"])
            if self._take():
                self._compiling = True
                return False
        # The next launch finds something under this key and does not ask again.
        fn.jit_function.device_caches[0][0][key] = self
        return True

    def _compiled(self, **_: object) -> bool:
        if self._compiling:
            self._end(None)
        return False

    # ------------------------------------------------------------------ tickets

    def _find_launcher(self, signature: dict[str, Any]) -> None:
        source = launchers.launcher_source(signature)
        if source is not None and source not in self._launchers:
            self._launchers.add(source)
            self._do(lambda: launchers.build_launcher(source))

    def _do(self, work: Callable[[], None]) -> None:
        if not self._take():
            return
        try:
            work()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _take(self) -> bool:
        """Number the job; True when it is this process's."""
        job, self.count = self.count, self.count + 1
        return job == self._ticket

    def _end(self, error: Exception | None) -> None:
        assert self._ticket is not None, "only a ticket's owner ends its job"
        self._compiling = False
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._tell(Report(self._ticket, said))
        self._ticket = self._draw()


def survey(executor: Rehearsal, keys: Sequence[Key], met: Callable[[int], None]) -> int:
    """Walk through all keys without compiling. ``met`` gets, after each, the number of jobs so far: the key is ready
    when that many first ones are done. Returns the number of all."""
    jobs = Jobs(lambda: None, lambda report: None)
    jobs.begin()
    for key in keys:
        jobs.walk(executor, key)
        met(jobs.count)
    return jobs.count
