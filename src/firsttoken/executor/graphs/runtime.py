"""What the executor needs of a device with streams: pinned memory, events, graphs. One class a kind of device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class Event(Protocol):
    """A point in the stream."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Runtime(Protocol):
    """A device with one stream for the steps. All calls come from the engine's thread."""

    device: torch.device

    def pinned(self, words: int) -> Tensor:
        """A zeroed int32 host buffer that the device can read and write."""
        ...

    def event(self) -> Event: ...

    def stream(self) -> AbstractContextManager[object]:
        """Work inside goes to the steps' stream."""
        ...

    def enter(self) -> None:
        """From here on, all that the calling thread starts on the device goes to the steps' stream; costs next to
        nothing when it does already."""
        ...

    def capture(self, segment: Callable[[], object]) -> Callable[[], None]:
        """Record what ``segment`` launches; the result launches it again, on the same memory.

        ``segment`` must have run once before, so that nothing is compiled or set up inside.
        """
        ...

    def graph_bytes(self) -> int:
        """Memory that graphs keep for what they compute."""
        ...

    def synchronize(self) -> None: ...

    def release(self) -> None:
        """Give memory that nothing holds any more back to the device."""
        ...


class _StreamEvent:
    """A CUDA event that is recorded on one stream, without asking which one is current."""

    __slots__ = ("query", "record", "synchronize")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.record: Callable[[], None] = partial(event.record, stream)
        self.query: Callable[[], bool] = event.query
        self.synchronize: Callable[[], None] = event.synchronize


class CUDARuntime:
    """CUDA streams and graphs. All graphs share one memory pool: they never run at the same time."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def event(self) -> Event:
        return _StreamEvent(self._stream)

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def enter(self) -> None:
        # Asked as Triton does for each launch: a tenth of what torch's own object of the current stream costs.
        if torch._C._cuda_getCurrentRawStream(self.device.index) != self._stream.cuda_stream:
            torch.cuda.set_stream(self._stream)

    def capture(self, segment: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # torch's own context would also wait for the device, collect garbage and empty the allocator's cache.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                segment()
            except BaseException:
                # What failed may have broken the capture too: what is said of that would hide the reason.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def graph_bytes(self) -> int:
        pool = tuple(self._pool)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(int(part["total_size"]) for part in segments if tuple(part.get("segment_pool_id", ())) == pool)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class _Passed:
    """An event of a runtime without a stream: whatever came before it is done."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostRuntime:
    """Runs everything at once: a device without streams or graphs, as CI has it, or ``meta``, where nothing is run."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device

    def pinned(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def event(self) -> Event:
        return _Passed()

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def enter(self) -> None:
        pass

    def capture(self, segment: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            with torch.inference_mode():  # a graph asks for no mode
                segment()

        return replay

    def graph_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass
