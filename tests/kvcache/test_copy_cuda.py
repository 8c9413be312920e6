"""What the copy engine asks of torch's streams and events, and of the driver, in which order. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from firsttoken.kvcache.cuda_driver import CUDADriver
from firsttoken.kvcache.stream_copy import StreamCopyEngine
from firsttoken.kvcache.torch_copy import CUDACopyDevice, CUDAPinning
from tests.support.copy_machine import Memory
from tests.support.cuda_stand_in import STREAM, StandIn

GPU = torch.device("cuda", 0)


class FakeStream:
    """Notes what is asked of it in ``log``; ``cuda_stream`` is what the stand-in of the driver expects."""

    log: list[tuple[str, ...]]

    def __init__(self, device: torch.device, priority: int = 0, name: str = "copies") -> None:
        assert (device, priority) == (GPU, 0)
        self.cuda_stream = STREAM
        self.name = name

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append((self.name, "waits for", event.recorded))


class FakeEvent:
    passed = False

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.recorded = ""

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream.name
        stream.log.append((stream.name, "records", "timed" if self.timing else "untimed"))

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        FakeEvent.passed = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timing
        assert end.timing
        return 0.5  # ms


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    log: list[tuple[str, ...]] = []
    monkeypatch.setattr(FakeStream, "log", log, raising=False)
    monkeypatch.setattr(FakeEvent, "passed", False)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(device, name="steps"))
    return log


def test_a_submit_waits_copies_and_records(log: list[tuple[str, ...]]) -> None:
    stand_in = StandIn()
    pools = {
        "device": Memory(np.zeros((4, 8), np.uint8), on_device=True),
        "host": Memory(np.arange(32, dtype=np.uint8).reshape(4, 8), on_device=False),
    }
    engine = StreamCopyEngine(pools, CUDACopyDevice(GPU, driver=CUDADriver(stand_in.load)))
    out = engine.submit("device", "host", [(3, 0)])
    assert log == [
        ("steps", "records", "untimed"),
        ("copies", "waits for", "steps"),
        ("copies", "records", "timed"),
        ("copies", "records", "timed"),
    ]
    log.clear()
    back = engine.submit("host", "device", [(1, 2), (3, 0)], after=[out], beside_compute=True)
    assert log == [("copies", "waits for", "copies"), ("copies", "records", "timed"), ("copies", "records", "timed")]
    assert stand_in.batches == [("new", 2)]
    assert pools["device"].blocks[[2, 0]].tolist() == pools["host"].blocks[[1, 3]].tolist()
    log.clear()
    back.gate_compute()
    mark = engine.mark()
    assert log == [("steps", "waits for", "copies"), ("steps", "records", "timed")]
    assert not back.done()
    assert not mark.done()
    engine.close()
    assert back.done()
    assert mark.done()
    # 16 bytes in half a millisecond.
    assert engine.meter("host", "device").cost.seconds(16) == pytest.approx(5e-4)


def test_pinning_is_for_the_gpu_that_the_kv_is_on() -> None:
    stand_in = StandIn()
    pinning = CUDAPinning(torch.device("cuda", 1), CUDADriver(stand_in.load))
    pinning.pin(1 << 40, 4096)
    assert stand_in.contexts[0] == "retain 1"
    pinning.unpin(1 << 40)
    assert not stand_in.pinned
