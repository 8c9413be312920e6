"""The order of copies and compute, on a simulated device that does things in whatever order it may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.kvcache.copy import CopyEngine, CopyHandle
from firsttoken.kvcache.stream_copy import StreamCopyEngine
from tests.support.copy_machine import Machine, Memory

DEVICE, HOST, BYTES = 5, 7, 8


class World:
    """A machine with two pools, and the same pools as they would be if all were done in the order of asking."""

    def __init__(self, seed: int = 0, first: str = "anyone") -> None:
        self.machine = Machine(seed, first=first)
        numbers = np.random.default_rng(seed)
        self.pools = {
            "device": Memory(numbers.integers(0, 250, (DEVICE, BYTES), np.uint8), on_device=True),
            "host": Memory(numbers.integers(0, 250, (HOST, BYTES), np.uint8), on_device=False),
        }
        self.engine: CopyEngine = StreamCopyEngine(self.pools, self.machine)
        self.model = {name: pool.blocks.copy() for name, pool in self.pools.items()}
        self.using: dict[tuple[str, int], list[CopyHandle]] = {}

    def copy(self, source: str, target: str, pairs: list[tuple[int, int]], *, after: bool = True) -> CopyHandle:
        blocks = [(source, a) for a, _ in pairs] + [(target, b) for _, b in pairs]
        earlier = [handle for block in blocks for handle in self.using.get(block, [])]
        handle = self.engine.submit(source, target, pairs, after=earlier if after else [])
        for block in blocks:
            self.using.setdefault(block, []).append(handle)
        copied = self.model[source][[a for a, _ in pairs]].copy()
        self.model[target][[b for _, b in pairs]] = copied
        return handle

    def compute(self, block: int, other: int, *, gate: bool = True) -> None:
        """block = other + 1, on the device."""
        if gate:
            for each in (block, other):
                for handle in self.using.get(("device", each), []):
                    handle.gate_compute()
        blocks = self.pools["device"].blocks

        def work(blocks: np.ndarray) -> None:
            blocks[block] = blocks[other] + 1

        self.machine.submit(lambda: work(blocks))
        work(self.model["device"])

    def same(self) -> bool:
        self.machine.finish()
        return all(np.array_equal(pool.blocks, self.model[name]) for name, pool in self.pools.items())


def some_pairs(draw, source: str, target: str) -> list[tuple[int, int]]:
    sizes = {"device": DEVICE, "host": HOST}
    sources = draw(st.lists(st.integers(0, sizes[source] - 1), min_size=1, max_size=4))
    targets = draw(st.permutations(range(sizes[target])))
    if source == target:
        targets = [block for block in targets if block not in sources]
    return list(zip(sources, targets, strict=False))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 1 << 20), st.sampled_from(["anyone", "compute", "copies"]))
def test_who_keeps_the_rules_finds_what_one_thing_after_the_other_would_give(data, seed: int, first: str) -> None:
    world = World(seed, first)
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["compute", "out", "in", "within", "host", "step", "look"]))
        match kind:
            case "compute":
                block, other = (data.draw(st.integers(0, DEVICE - 1)) for _ in range(2))
                world.compute(block, other)
            case "step":
                world.machine.step()
            case "look":
                [handle.done() for handles in world.using.values() for handle in handles]
            case _:
                names = {
                    "out": ("device", "host"),
                    "in": ("host", "device"),
                    "within": ("device", "device"),
                    "host": ("host", "host"),
                }
                source, target = names[kind]
                if pairs := some_pairs(data.draw, source, target):
                    world.copy(source, target, pairs)
    assert world.same()


@pytest.mark.parametrize("gate", [True, False])
def test_a_block_is_written_anew_only_after_its_copy_has_left(gate: bool) -> None:
    world = World(first="compute")
    world.copy("device", "host", [(3, 6)])
    world.compute(3, 1, gate=gate)
    assert world.same() is gate  # without the gate, compute overtakes the copy


@pytest.mark.parametrize("gate", [True, False])
def test_compute_reads_what_was_restored_only_after_it_has_come(gate: bool) -> None:
    world = World(first="compute")
    world.copy("host", "device", [(2, 0), (3, 1)])
    world.compute(4, 1, gate=gate)
    assert world.same() is gate


@pytest.mark.parametrize("after", [True, False])
def test_a_host_block_is_used_again_only_after_its_copy(after: bool) -> None:
    world = World(first="compute")  # of copies the stream that was made last: "in"
    world.copy("device", "host", [(0, 5)])
    world.engine.submit("host", "device", [(1, 1)])  # so that there is a stream for each direction
    world.copy("host", "device", [(5, 2)], after=after)
    assert world.machine.queues.keys() == {"out", "in"}
    world.model["device"][1] = world.model["host"][1]
    assert world.same() is after


def test_a_copy_waits_for_compute_that_was_there_before_it_unless_told_otherwise() -> None:
    world = World(first="copies")
    world.compute(0, 1)
    assert world.copy("device", "host", [(0, 0)]) is not None
    assert world.same()

    hasty = World(first="copies")
    hasty.compute(0, 1)
    before = hasty.pools["device"].blocks[0].copy()
    hasty.engine.submit("device", "host", [(0, 0)], beside_compute=True)
    hasty.machine.finish()
    assert np.array_equal(hasty.pools["host"].blocks[0], before)

    marked = World(first="copies")
    marked.compute(0, 1)
    mark = marked.engine.mark()
    assert not mark.done()
    marked.engine.submit("device", "host", [(0, 0)], after=[mark], beside_compute=True)
    marked.machine.finish()
    assert mark.done()
    assert np.array_equal(marked.pools["host"].blocks[0], marked.model["device"][0])


def test_asking_whether_it_is_done_moves_nothing() -> None:
    world = World()
    handle = world.copy("device", "host", [(0, 0), (2, 2)])
    before = len(world.machine.queues["out"].operations)
    assert not handle.done()
    assert world.engine.pending_bytes("device", "host") == 2 * BYTES
    assert len(world.machine.queues["out"].operations) == before
    handle.wait()
    assert handle.done()
    assert world.engine.pending_bytes("device", "host") == 0
    handle.wait()
    handle.gate_compute()  # nothing to wait for any more
    assert not world.machine.compute.operations


def test_events_are_used_again_and_a_submit_is_one_call() -> None:
    world = World()
    for round_ in range(100):
        world.copy("device", "host", [(round_ % DEVICE, round_ % HOST), ((round_ + 2) % DEVICE, (round_ + 3) % HOST)])
        world.copy("host", "device", [(round_ % HOST, round_ % DEVICE)]).wait()
        world.engine.mark().wait()
    assert world.machine.events <= 8
    assert world.machine.calls == 200
    assert world.same()


def test_an_event_in_use_again_does_not_wake_who_waited_for_its_last_recording() -> None:
    """The second copy's events are the first one's, recorded anew while compute still waits for the first."""
    world = World(first="copies")
    first = world.copy("device", "host", [(0, 0)])
    first.gate_compute()
    world.compute(0, 1)
    first.wait()
    assert first.done()
    world.copy("device", "host", [(0, 1)])
    assert world.same()


def test_closing_waits_for_copies_and_nothing_comes_after() -> None:
    world = World(first="compute")
    out, back = world.copy("device", "host", [(0, 0)]), world.copy("host", "device", [(3, 3)])
    world.engine.close()
    assert out.done()
    assert back.done()
    with pytest.raises(RuntimeError, match="closed"):
        world.engine.submit("device", "host", [(0, 0)])
    world.engine.close()
    assert world.same()


def test_a_submit_is_bounded_so_that_a_restore_can_be_cut() -> None:
    world = World()
    engine = StreamCopyEngine(world.pools, world.machine, max_submit_bytes=2 * BYTES)
    assert engine.max_blocks == 2
    with pytest.raises(ValueError, match="3 blocks is more than the 2"):
        engine.submit("device", "host", [(0, 0), (1, 1), (2, 2)])
    assert not world.machine.queues


def test_what_copies_take_is_learned_by_direction() -> None:
    machine = Machine(bytes_per_s=4e9)
    size = 1 << 16
    pools = {
        "device": Memory(np.zeros((8, size), np.uint8), on_device=True),
        "host": Memory(np.zeros((8, size), np.uint8), on_device=False),
    }
    engine = StreamCopyEngine(pools, machine)
    before = engine.gigabytes_per_s("device", "host")
    for count in (1, 2, 4, 8) * 8:
        engine.submit("host", "device", [(block, block) for block in range(count)]).wait()
    # Each is one piece: the machine's 10 us for it, and its bytes.
    assert engine.seconds("host", "device", 6) == pytest.approx(1e-5 + 6 * size / 4e9, rel=0.03)
    assert engine.gigabytes_per_s("host", "device") == pytest.approx(4, rel=0.05)
    assert engine.gigabytes_per_s("device", "host") == before
    engine.submit("host", "device", [(0, 0), (1, 1)])
    # What is pending goes before.
    assert engine.seconds("host", "device", 6) == pytest.approx(1e-5 + 8 * size / 4e9, rel=0.03)
    machine.finish()


def test_what_has_arrived_is_counted_by_direction_once_and_without_waiting() -> None:
    world = World()
    engine, machine = world.engine, world.machine
    inward, outward = engine.moved("host", "device"), engine.moved("device", "host")
    assert engine.moved("host", "device") is inward
    first = world.copy("host", "device", [(0, 0), (2, 3)])
    second = world.copy("device", "host", [(1, 1)])
    assert not first.done()
    assert (inward.nbytes, outward.nbytes) == (0, 0), "counted before it has come"
    machine.finish()
    assert (inward.nbytes, inward.ns) == (0, 0), "nobody has looked yet"
    assert all(handle.done() for handle in (first, first, second))
    assert (inward.nbytes, outward.nbytes) == (2 * BYTES, BYTES)
    assert inward.ns == pytest.approx(2 * (1e-5 + BYTES / machine.bytes_per_s) * 1e9, abs=2)
    engine.mark().done()
    assert inward.nbytes + outward.nbytes == 3 * BYTES
    with pytest.raises(KeyError):
        engine.moved("host", "moon")


def test_gaps_and_segments_are_copied_around() -> None:
    numbers = np.random.default_rng(3)
    machine = Machine()
    pools = {
        "device": Memory(numbers.integers(0, 250, (6, 10), np.uint8), on_device=True),
        "host": Memory(numbers.integers(0, 250, (6, 16), np.uint8), on_device=False, block_bytes=10),
    }
    before = pools["host"].blocks.copy()
    StreamCopyEngine(pools, machine).submit("device", "host", [(0, 1), (1, 2)])
    machine.finish()
    assert np.array_equal(pools["host"].blocks[1:3, :10], pools["device"].blocks[:2])
    assert np.array_equal(pools["host"].blocks[:, 10:], before[:, 10:])
    assert np.array_equal(pools["host"].blocks[3:], before[3:])
