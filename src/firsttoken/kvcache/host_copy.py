"""Copies on a machine whose "device" is its own memory: plain ones, in the order of the thread that computes."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from firsttoken.kvcache.copy import CopyHandle, Moved, Piece
from firsttoken.kvcache.stream_copy import CopyStream, Direction, Event, StreamCopyEngine

Defer = Callable[[Callable[[], None]], None]


def copy_now(parts: Sequence[Piece]) -> None:
    """By the calling thread; other threads run meanwhile."""
    for part in parts:
        ctypes.memmove(part.target, part.source, part.nbytes)


class _Passed:
    """All that came before it is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostCopyDevice:
    """A `CopyDevice` without streams: everything is done when the call returns, before any later compute."""

    def stream(self, direction: Direction) -> CopyStream:
        raise ValueError(f"a pool {direction!r} a device needs a device with streams: this one has host memory only")

    def event(self) -> Event:
        return _Passed()

    def seconds_between(self, begin: Event, end: Event) -> float:
        return 0.0

    def record_compute(self, event: Event) -> None:
        pass

    def gate_compute(self, event: Event) -> None:
        pass

    def copy_now(self, parts: Sequence[Piece]) -> None:
        copy_now(parts)


class _Deferred:
    """A copy in another thread's queue. Compute is in the same queue, and so always behind it."""

    __slots__ = ("future", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.future: Future[None] = Future()
        self.nbytes = nbytes

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()

    def gate_compute(self) -> None:
        pass


class DeferredCopyEngine:
    """A `CopyEngine` whose copies are done by the thread that computes, in the order in which steps and copies were
    submitted: ``defer`` hands it something to do. So all orders that callers may ask for hold by themselves.

    A copy takes the time of a step that would run meanwhile; `max_blocks` bounds that.
    """

    def __init__(self, engine: StreamCopyEngine, defer: Defer) -> None:
        self._engine = engine
        self._defer = defer
        self._flying: deque[_Deferred] = deque()
        self._closed = False

    @property
    def block_bytes(self) -> int:
        return self._engine.block_bytes

    @property
    def max_blocks(self) -> int:
        return self._engine.max_blocks

    def num_blocks(self, pool: str) -> int:
        return self._engine.num_blocks(pool)

    def mark(self) -> CopyHandle:
        return self._hand_over(_Deferred(0), lambda: None)

    def submit(
        self,
        source: str,
        target: str,
        pairs: Sequence[tuple[int, int]],
        *,
        after: Sequence[CopyHandle] = (),
        beside_compute: bool = False,
    ) -> CopyHandle:
        """``beside_compute`` changes nothing here: there is one queue."""
        if self._closed:
            raise RuntimeError("the copy engine is closed: nothing can be submitted any more")
        self._engine.check(source, target, pairs)
        strangers = [handle for handle in after if not isinstance(handle, _Deferred)]
        kept = list(pairs)
        handle = _Deferred(len(kept) * self.block_bytes)
        return self._hand_over(handle, lambda: self._engine.submit(source, target, kept, after=strangers).wait())

    def pending_bytes(self, source: str, target: str) -> int:
        """Of all directions: they share one thread."""
        self._engine.num_blocks(source), self._engine.num_blocks(target)
        self._reap()
        return sum(handle.nbytes for handle in self._flying)

    def seconds(self, source: str, target: str, blocks: int) -> float:
        pending = self.pending_bytes(source, target)
        return self._engine.meter(source, target).cost.seconds(pending + blocks * self.block_bytes)

    def gigabytes_per_s(self, source: str, target: str) -> float:
        return self._engine.gigabytes_per_s(source, target)

    def moved(self, source: str, target: str) -> Moved:
        """The lane's thread counts a copy when it has made it."""
        return self._engine.moved(source, target)

    def close(self) -> None:
        self._closed = True
        while self._flying:
            self._flying.popleft().future.exception()  # whoever has the handle is told by it

    def _hand_over(self, handle: _Deferred, work: Callable[[], None]) -> CopyHandle:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                handle.future.set_exception(error)
            else:
                handle.future.set_result(None)

        self._reap()
        self._flying.append(handle)
        self._defer(run)
        return handle

    def _reap(self) -> None:
        while self._flying and self._flying[0].future.done():
            self._flying.popleft()
