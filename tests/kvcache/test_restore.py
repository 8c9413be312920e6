"""One restore: which copies it submits, behind what, and what has come of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from firsttoken.kvcache.disk import DiskHandle, Outcome
from firsttoken.kvcache.tiers.restore import FileRead, Load, Restore, Restored


class Copy:
    def __init__(self) -> None:
        self.arrived = self.gates = False

    def done(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        assert self.arrived, "nothing here may wait"

    def gate_compute(self) -> None:
        self.gates = True


class Engine:
    """Notes what is submitted."""

    max_blocks = 2

    def __init__(self) -> None:
        self.submitted: list[tuple[list[tuple[int, int]], list[Any], Copy]] = []

    def submit(self, source: str, target: str, pairs: Sequence[tuple[int, int]], *, after: Sequence[Any] = ()) -> Copy:
        assert (source, target) == ("host", "device")
        copy = Copy()
        self.submitted.append((list(pairs), list(after), copy))
        return copy


class Host:
    """``arriving`` are copies that still fill blocks."""

    def __init__(self, arriving: dict[int, Copy]) -> None:
        self.arriving = arriving

    def copies_to(self, blocks: Sequence[int]) -> list[Copy]:
        return [self.arriving[block] for block in blocks if block in self.arriving]


class Lease:
    class tail:  # noqa: N801  # stands for a shard
        live = True

    def blocks(self, first: int, end: int) -> list[int]:
        return [100 + block for block in range(first, end)]


def load(first: int, blocks: list[int], handle: DiskHandle) -> Load:
    return Load(first, FileRead((b"", first), blocks, handle))


def restore(first: int, host_end: int, targets: list[int], loads: Sequence[Load] = ()) -> Restore:
    lease: Any = Lease() if host_end > first else None
    return Restore(first, host_end, targets, lease, deque(loads), 0, 0.0, 0.0)


def test_copies_come_behind_what_fills_their_sources_and_what_reads_their_targets() -> None:
    engine: Any = Engine()
    filling, other, reading = Copy(), Copy(), Copy()
    host: Any = Host({103: filling, 999: other})
    one = restore(2, 5, [20, 21, 22])
    assert not one.advance(host, engine, [reading])
    assert [pairs for pairs, _, _ in engine.submitted] == [[(102, 20), (103, 21)], [(104, 22)]]
    assert all(after == [reading, filling] for _, after, _ in engine.submitted)
    for _, _, copy in engine.submitted:
        assert not one.advance(host, engine)
        copy.arrived = True
    assert one.advance(host, engine)
    assert one.restored(16) == Restored(48, 0)


def test_files_are_copied_in_their_order_behind_what_reads_their_targets() -> None:
    engine: Any = Engine()
    reading, handles = Copy(), [DiskHandle(), DiskHandle()]
    one = restore(0, 0, [5, 6, 7], [load(0, [1, 2], handles[0]), load(2, [3, 4], handles[1])])
    handles[1].resolve(Outcome.DONE)
    assert not one.advance(Host({}), engine, [reading])  # type: ignore[arg-type]
    assert not engine.submitted, "the first has not been read"
    handles[0].resolve(Outcome.DONE)
    assert not one.advance(Host({}), engine, [reading])  # type: ignore[arg-type]
    assert [pairs for pairs, _, _ in engine.submitted] == [[(1, 5), (2, 6)], [(3, 7)]], "no more than is wanted"
    assert all(after == [reading] for _, after, _ in engine.submitted)
    assert [each.blocks for each in one.staged] == [[1, 2], [3, 4]]


def test_what_follows_a_file_that_could_not_be_read_is_not_restored() -> None:
    engine: Any = Engine()
    handles = [DiskHandle(Outcome.DONE), DiskHandle(Outcome.CORRUPT), DiskHandle(Outcome.DONE)]
    one = restore(0, 0, [5, 6, 7], [load(at, [at], handle) for at, handle in enumerate(handles)])
    one.advance(Host({}), engine)  # type: ignore[arg-type]
    assert [pairs for pairs, _, _ in engine.submitted] == [[(0, 5)]]
    engine.submitted[0][2].arrived = True
    assert one.advance(Host({}), engine)  # type: ignore[arg-type]
    assert one.restored(16) == Restored(0, 16)
    assert one.failed


def test_a_restore_that_is_given_up_gates_what_is_computed_next() -> None:
    engine: Any = Engine()
    late = DiskHandle()
    one = restore(0, 2, [5, 6, 7], [load(2, [9], late)])
    one.advance(Host({}), engine)  # type: ignore[arg-type]
    one.cancel()
    assert engine.submitted[0][2].gates
    late.resolve(Outcome.DONE)
    engine.submitted[0][2].arrived = True
    assert one.advance(Host({}), engine)  # type: ignore[arg-type]
    assert len(engine.submitted) == 1, "nothing more is copied to blocks that are somebody else's"
    assert [each.blocks for each in one.staged] == [[9]], "and what was read is given back"
