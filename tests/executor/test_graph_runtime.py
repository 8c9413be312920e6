"""What the CUDA runtime asks of torch, without a GPU: events know their stream, and a thread enters it once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from firsttoken.executor.graphs.runtime import CUDARuntime


class Event:
    """Remembers what it was recorded on."""

    def __init__(self) -> None:
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return bool(self.recorded)

    def synchronize(self) -> None:
        self.recorded.clear()


@pytest.fixture
def runtime() -> CUDARuntime:
    made = CUDARuntime.__new__(CUDARuntime)
    made.device = torch.device("cuda", 0)
    made._stream = SimpleNamespace(cuda_stream=77)
    return made


def test_an_event_is_recorded_on_the_steps_stream_whichever_is_current(runtime, monkeypatch):
    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    event = runtime.event()
    assert not event.query()
    event.record()
    assert event.query()
    assert events[0].recorded == [runtime._stream]
    event.synchronize()
    assert not event.query()


def test_a_thread_enters_the_stream_when_another_one_is_current(runtime, monkeypatch):
    current = [0]
    changes: list[object] = []

    def set_stream(stream: SimpleNamespace) -> None:
        changes.append(stream)
        current[0] = stream.cuda_stream

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[index], raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    runtime.enter()
    runtime.enter()
    assert changes == [runtime._stream]
    current[0] = 5
    runtime.enter()
    assert len(changes) == 2
