"""Copies where the device is host memory: at once, or in the queue of the thread that computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.kvcache.copy import CopyEngine, check_pairs, cut
from firsttoken.kvcache.host import HostMemory
from firsttoken.kvcache.host_copy import DeferredCopyEngine
from firsttoken.kvcache.torch_copy import TorchCopyEngine, open_copies


class Lane:
    """A thread with a queue, as an executor's."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (work := self.queue.get()) is not None:
            work()

    def hold(self) -> threading.Event:
        """It does nothing until the event is set."""
        go = threading.Event()
        self.queue.put(lambda: go.wait(20))
        return go

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(20)


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane()
    yield lane
    lane.close()


def make(lane: Lane, blocks: int = 6) -> tuple[torch.Tensor, HostMemory, DeferredCopyEngine]:
    device = torch.randn(blocks, 3, 7, generator=torch.Generator().manual_seed(1))
    host = HostMemory(10, device[0].numel() * 4)
    return device, host, DeferredCopyEngine(open_copies(device, host), lane.queue.put)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["now", "deferred"]))
def test_scattered_copies_agree_with_a_model(data, how: str) -> None:
    lane = Lane()
    device, host, deferred = make(lane)
    engine: CopyEngine = deferred if how == "deferred" else TorchCopyEngine({"device": device, "host": host})
    block_bytes = device[0].numel() * 4
    sizes = {"device": 6, "host": 10}
    model = {
        "device": device.numpy().copy().view(np.uint8).reshape(6, -1),
        "host": np.zeros((10, block_bytes), np.uint8),
    }
    for _ in range(data.draw(st.integers(1, 10))):
        source, target = (data.draw(st.sampled_from(["device", "host"])) for _ in range(2))
        pairs = data.draw(
            st.lists(st.tuples(st.integers(0, sizes[source] - 1), st.integers(0, sizes[target] - 1)), max_size=6)
        )
        try:
            check_pairs(pairs, sizes[source], sizes[target], same_pool=source == target)
        except ValueError:
            continue
        engine.submit(source, target, pairs)
        for a, b in pairs:
            model[target][b] = model[source][a]
    mark = engine.mark()
    mark.wait()
    assert np.array_equal(device.numpy().view(np.uint8).reshape(6, -1), model["device"])
    for block in range(10):
        assert bytes(host.view(block))[:block_bytes] == model["host"][block].tobytes()
    lane.close()


def test_copies_keep_their_place_among_the_steps(lane: Lane) -> None:
    device, _, engine = make(lane)
    before = device.clone()
    go = lane.hold()
    lane.queue.put(lambda: device[2].fill_(7.0))  # a step that computes the block
    out = engine.submit("device", "host", [(2, 9)])
    out.gate_compute()
    lane.queue.put(lambda: device[2].zero_())  # a step that uses it again
    back = engine.submit("host", "device", [(9, 4)], after=[out])
    assert not out.done()
    assert engine.pending_bytes("device", "host") == 2 * engine.block_bytes
    assert torch.equal(device, before)
    go.set()
    back.wait()
    assert out.done()
    assert (device[4] == 7.0).all()
    assert not device[2].any()
    assert engine.pending_bytes("device", "host") == 0


def test_wrong_pairs_are_refused_where_they_are_submitted(lane: Lane) -> None:
    _, _, engine = make(lane)
    with pytest.raises(ValueError, match="target block 10"):
        engine.submit("device", "host", [(0, 10)])
    with pytest.raises(KeyError):
        engine.submit("disk", "host", [])
    with pytest.raises(KeyError):
        engine.pending_bytes("disk", "host")


def test_closing_waits_and_nothing_comes_after(lane: Lane) -> None:
    device, host, engine = make(lane)
    go = lane.hold()
    handle = engine.submit("device", "host", [(0, 0), (3, 1)])
    threading.Timer(0.05, go.set).start()
    engine.close()
    assert handle.done()
    assert bytes(host.view(1))[:84] == device[3].numpy().tobytes()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit("device", "host", [(0, 0)])
    host.close()


def test_what_goes_wrong_is_told_by_the_handle() -> None:
    class Broken(TorchCopyEngine):
        def submit(self, *args, **options):
            raise MemoryError("broken")

    device = torch.zeros(4, 8)
    engine = DeferredCopyEngine(Broken({"device": device}), lambda work: work())
    handle = engine.submit("device", "device", [(0, 1)])
    assert handle.done()
    with pytest.raises(MemoryError, match="broken"):
        handle.wait()
    engine.close()


def test_what_copies_take_is_learned(lane: Lane) -> None:
    device = torch.zeros(8, 1 << 20)
    host = HostMemory(8, 4 << 20)
    engine = DeferredCopyEngine(open_copies(device, host), lane.queue.put)
    for _ in range(3):
        engine.submit("device", "host", [(block, block) for block in range(8)]).wait()
    assert engine._engine.meter("device", "host").observed == 3
    moved = engine.moved("device", "host")
    assert moved.nbytes == 3 * device.nbytes
    assert 0 < moved.ns < 3e9
    assert engine.moved("host", "device").nbytes == 0
    assert 0 < engine.gigabytes_per_s("device", "host") < 1000
    nothing, all_ = engine.seconds("device", "host", 0), engine.seconds("device", "host", 8)
    assert nothing == 0
    assert 0 < all_ < 1


def test_a_restore_is_cut_in_order() -> None:
    pairs = [(block, block + 1) for block in range(7)]
    assert [list(part) for part in cut(pairs, 3)] == [pairs[:3], pairs[3:6], pairs[6:]]
    assert cut([], 3) == []


def test_blocks_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of pool 'host' have 20 bytes, those of 'device' 16"):
        TorchCopyEngine({"device": torch.zeros(2, 4), "host": HostMemory(4, 20)})


def test_memory_that_has_not_been_opened_has_no_blocks() -> None:
    host = HostMemory(4, 16)
    engine = TorchCopyEngine({"device": torch.zeros(2, 4), "host": host})
    assert engine.num_blocks("host") == 0
    with pytest.raises(ValueError, match="target block 0 is outside its pool of 0"):
        engine.submit("device", "host", [(0, 0)])
    host.open()
    engine.submit("device", "host", [(0, 0)]).wait()
