"""The copy engine on a device with streams: what waits for what, and what is known of copies under way. Torch-free.

Each direction has a stream of its own, so that both can be busy at once and neither delays compute. A submit is, on its
direction's stream: wait for compute, wait for ``after``, begin event, all pieces, end event. The host waits for none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from firsttoken.core.clock import now_ns
from firsttoken.kvcache.copy import MAX_SUBMIT_BYTES, BlockMemory, CopyHandle, Moved, Piece, check_pairs, pieces
from firsttoken.kvcache.copy_meter import CopyCost, CopyMeter

Direction: TypeAlias = Literal["in", "out", "within", "host"]

# What is thought of a direction before anything was measured: modest, for a link of unknown width.
_LINK = CopyCost(fixed_s=20e-6, s_per_byte=1 / 20e9)
_PRIORS: dict[Direction, CopyCost] = {
    "in": _LINK,
    "out": _LINK,
    "within": CopyCost(fixed_s=20e-6, s_per_byte=1 / 500e9),
    "host": CopyCost(fixed_s=5e-6, s_per_byte=1 / 5e9),
}


class Event(Protocol):
    """A point in a stream, recorded anew each time that it is used."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    """Copies in the order in which they are given, beside all other streams."""

    def wait_compute(self) -> None:
        """What is given later starts after all compute that has been submitted."""

    def wait_event(self, event: Event) -> None: ...

    def copy(self, parts: Sequence[Piece]) -> None: ...

    def record(self, event: Event) -> None: ...


class CopyDevice(Protocol):
    """What a device must offer."""

    def stream(self, direction: Direction) -> CopyStream: ...

    def event(self) -> Event: ...

    def seconds_between(self, begin: Event, end: Event) -> float:
        """By the device's clock; both have passed."""
        ...

    def record_compute(self, event: Event) -> None:
        """Behind all compute that has been submitted."""

    def gate_compute(self, event: Event) -> None:
        """Compute that is submitted from now on starts after the event."""

    def copy_now(self, parts: Sequence[Piece]) -> None:
        """From host memory to host memory, by the calling thread."""


class _Flight:
    """A submitted copy (without ``begin``: a mark). ``end`` is given back when the copy is seen to have arrived, and
    it is then counted in ``moved``."""

    __slots__ = ("_engine", "begin", "end", "line", "moved", "nbytes")

    def __init__(
        self,
        engine: StreamCopyEngine,
        line: _Line,
        begin: Event | None,
        end: Event | None,
        nbytes: int = 0,
        moved: Moved | None = None,
    ) -> None:
        self._engine = engine
        self.line = line
        self.begin = begin
        self.end = end
        self.nbytes = nbytes
        self.moved = moved

    def done(self) -> bool:
        if self.end is not None:
            self._engine.reap(self.line)
        return self.end is None

    def wait(self) -> None:
        if self.end is not None:
            self.end.synchronize()
            self._engine.reap(self.line)

    def gate_compute(self) -> None:
        if self.end is not None:
            self._engine.gate(self.end)


class _Line:
    """Flights of one stream in order, the oldest first, and what they teach. ``stream``: None for compute's own."""

    __slots__ = ("flights", "meter", "pending", "stream")

    def __init__(self, stream: CopyStream | None, meter: CopyMeter) -> None:
        self.stream = stream
        self.meter = meter
        self.flights: deque[_Flight] = deque()
        self.pending = 0


class StreamCopyEngine:
    """`CopyEngine` for pools of equal blocks in host memory and on one device.

    Events are used again, so that a submit makes none once as many exist as were ever under way. Copies within host
    memory are done by the calling thread at once. Raises `ValueError` for pools that do not match.
    """

    def __init__(
        self, pools: Mapping[str, BlockMemory], device: CopyDevice, *, max_submit_bytes: int = MAX_SUBMIT_BYTES
    ) -> None:
        if not pools:
            raise ValueError("a copy engine needs at least one pool")
        self._pools = dict(pools)
        first_name, first = next(iter(self._pools.items()))
        for name, pool in self._pools.items():
            if pool.block_bytes != first.block_bytes:
                raise ValueError(
                    f"blocks of pool {name!r} have {pool.block_bytes} bytes, those of {first_name!r} "
                    f"{first.block_bytes}; they must be equal"
                )
        self._block_bytes = first.block_bytes
        self._max_blocks = max(1, max_submit_bytes // first.block_bytes)
        self._device = device
        self._compute = _Line(None, CopyMeter(_PRIORS["host"]))
        self._lines: dict[Direction, _Line] = {}
        self._host = CopyMeter(_PRIORS["host"])
        self._events: list[Event] = []
        self._moved: dict[tuple[str, str], Moved] = {}
        self._closed = False

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def max_blocks(self) -> int:
        return self._max_blocks

    def num_blocks(self, pool: str) -> int:
        return self._pools[pool].num_blocks

    def mark(self) -> CopyHandle:
        self.reap(self._compute)
        flight = _Flight(self, self._compute, None, self._event())
        self._device.record_compute(flight.end)  # type: ignore[arg-type]
        self._compute.flights.append(flight)
        return flight

    def submit(
        self,
        source: str,
        target: str,
        pairs: Sequence[tuple[int, int]],
        *,
        after: Sequence[CopyHandle] = (),
        beside_compute: bool = False,
    ) -> CopyHandle:
        self.check(source, target, pairs)
        origin, destination = self._pools[source], self._pools[target]
        parts = pieces(pairs, origin, destination)
        nbytes = len(pairs) * self._block_bytes
        direction = _direction(origin, destination)
        if direction == "host":
            return self._copy_now(parts, nbytes, after, self.moved(source, target))
        line = self._line(direction)
        self.reap(line)
        stream = line.stream
        assert stream is not None
        if not beside_compute:
            stream.wait_compute()
        for handle in after:
            if not isinstance(handle, _Flight):
                handle.wait()
            elif handle.end is not None and handle.line is not line:  # a stream keeps its own order
                stream.wait_event(handle.end)
        flight = _Flight(self, line, self._event(), self._event(), nbytes, self.moved(source, target))
        stream.record(flight.begin)  # type: ignore[arg-type]
        stream.copy(parts)
        stream.record(flight.end)  # type: ignore[arg-type]
        line.flights.append(flight)
        line.pending += nbytes
        return flight

    def pending_bytes(self, source: str, target: str) -> int:
        line = self._lines.get(_direction(self._pools[source], self._pools[target]))
        if line is None:
            return 0
        self.reap(line)
        return line.pending

    def seconds(self, source: str, target: str, blocks: int) -> float:
        pending = self.pending_bytes(source, target)
        return self.meter(source, target).cost.seconds(pending + blocks * self._block_bytes)

    def gigabytes_per_s(self, source: str, target: str) -> float:
        slope = self.meter(source, target).cost.s_per_byte
        return 1e-9 / slope if slope > 0 else float("inf")

    def moved(self, source: str, target: str) -> Moved:
        found = self._moved.get((source, target))
        if found is None:
            self.num_blocks(source), self.num_blocks(target)  # refuses what is no pool
            found = self._moved.setdefault((source, target), Moved())
        return found

    def meter(self, source: str, target: str) -> CopyMeter:
        """What was learned of a direction."""
        direction = _direction(self._pools[source], self._pools[target])
        return self._host if direction == "host" else self._line(direction).meter

    def check(self, source: str, target: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise what `submit` would of these."""
        if self._closed:
            raise RuntimeError("the copy engine is closed: nothing can be submitted any more")
        origin, destination = self._pools[source], self._pools[target]
        if len(pairs) > self._max_blocks:
            raise ValueError(
                f"a submit of {len(pairs)} blocks is more than the {self._max_blocks} that one may have: cut it"
            )
        check_pairs(pairs, origin.num_blocks, destination.num_blocks, same_pool=origin is destination)

    def close(self) -> None:
        self._closed = True
        for line in (self._compute, *self._lines.values()):
            if line.flights:
                line.flights[-1].wait()

    # ------------------------------------------------------------------ inside

    def reap(self, line: _Line) -> None:
        """Take note of the copies that have arrived. Never blocks."""
        flights = line.flights
        while flights:
            flight = flights[0]
            begin, end = flight.begin, flight.end
            assert end is not None
            if not end.query():
                return
            flights.popleft()
            line.pending -= flight.nbytes
            flight.begin = flight.end = None
            if begin is not None:
                seconds = self._device.seconds_between(begin, end)
                line.meter.observe(flight.nbytes, seconds)
                if flight.moved is not None:
                    flight.moved.add(flight.nbytes, seconds)
                self._events.append(begin)
            self._events.append(end)

    def gate(self, event: Event) -> None:
        self._device.gate_compute(event)

    def _event(self) -> Event:
        return self._events.pop() if self._events else self._device.event()

    def _line(self, direction: Direction) -> _Line:
        line = self._lines.get(direction)
        if line is None:
            line = _Line(self._device.stream(direction), CopyMeter(_PRIORS[direction]))
            self._lines[direction] = line
        return line

    def _copy_now(self, parts: Sequence[Piece], nbytes: int, after: Sequence[CopyHandle], moved: Moved) -> CopyHandle:
        for handle in after:
            handle.wait()
        began = now_ns()
        self._device.copy_now(parts)
        seconds = (now_ns() - began) / 1e9
        self._host.observe(nbytes, seconds)
        moved.add(nbytes, seconds)
        return _Flight(self, self._compute, None, None)


def _direction(origin: BlockMemory, destination: BlockMemory) -> Direction:
    if origin.on_device:
        return "within" if destination.on_device else "out"
    return "in" if destination.on_device else "host"
