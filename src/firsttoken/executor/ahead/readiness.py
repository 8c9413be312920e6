"""Which steps have all their kernels, as the executor asks it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from firsttoken.executor.ahead.messages import Progress

if TYPE_CHECKING:
    from firsttoken.executor.ahead.plan import Key  # brings torch

log = logging.getLogger(__name__)

# Longer than any kernel takes: a worker that hangs must not hold a request for good.
_LONGEST_WAIT_S = 60.0


class Compiler(Protocol):
    """`client.AheadCompiler`."""

    alive: bool
    progress: Progress

    def poll(self, wait_s: float = 0.0) -> bool: ...

    def wait_ready(self, entries: int, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


class Readiness:
    """``compiler`` was ordered to compile ``keys``; without one every kernel is compiled where it is first launched."""

    def __init__(self, compiler: Compiler | None = None, keys: Sequence[Key] = ()) -> None:
        self._compiler = compiler
        self._entries = {key: index + 1 for index, key in enumerate(keys)}
        self._told = False

    @property
    def unsure(self) -> bool:
        """The compiler is gone without having finished: nothing more will be known."""
        compiler = self._compiler
        return compiler is not None and not compiler.alive and not compiler.progress.finished

    def ready(self, key: Key) -> bool:
        """Capturing the key's graph compiles nothing. A key that was not ordered is ready when all others are."""
        compiler = self._compiler
        if compiler is None:
            return True
        compiler.poll()
        if compiler.progress.finished:
            self._tell_failures(compiler.progress)
            return True
        return compiler.progress.ready >= self._entry(key, len(self._entries) + 1)

    def wait(self, key: Key) -> None:
        """Until a step of the key compiles nothing, or it is clear that it will; at once for one that was not
        ordered."""
        if self._compiler is not None:
            self.wait_first(self._entries.get(key) or self._entry(key, 0))

    def wait_first(self, entries: int) -> None:
        """The same for the first so many keys."""
        compiler = self._compiler
        if compiler is None or compiler.progress.ready >= entries or not compiler.alive:
            return
        before = compiler.progress.done
        if compiler.wait_ready(entries, _LONGEST_WAIT_S) or compiler.progress.finished:
            return
        log.warning("kernels of a step were not compiled ahead in time: they are compiled now")
        if compiler.progress.done == before:
            compiler.close()  # it hangs, and the next step would wait as long

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _entry(self, key: Key, otherwise: int) -> int:
        from firsttoken.executor.ahead.plan import captured_with

        return self._entries.get(captured_with(key), otherwise)

    def _tell_failures(self, progress: Progress) -> None:
        if not self._told:
            self._told = True
            for failure in progress.failed:
                log.warning("a kernel could not be compiled ahead: %s", failure)
