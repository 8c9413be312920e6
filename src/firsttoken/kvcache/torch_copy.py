"""The copy engine for torch tensors. The one file of this room that imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from firsttoken.kvcache.copy import MAX_SUBMIT_BYTES, BlockMemory, Piece
from firsttoken.kvcache.cuda_driver import CUDADriver
from firsttoken.kvcache.host import HostMemory
from firsttoken.kvcache.host_copy import HostCopyDevice, copy_now
from firsttoken.kvcache.stream_copy import CopyDevice, CopyStream, Direction, Event, StreamCopyEngine


class TensorMemory:
    """The blocks of a contiguous tensor ``[num_blocks, ...]``, as `copy.BlockMemory`. Raises `ValueError` for any
    other."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.ndim < 2 or not tensor.is_contiguous():
            raise ValueError(
                f"a pool must be a contiguous [num_blocks, ...] tensor, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a pool must be on the CPU or on a CUDA device, got {tensor.device}")
        self.tensor = tensor
        # Read for each submit: torch takes a while to tell.
        self.address: int = tensor.data_ptr()
        self.num_blocks: int = tensor.shape[0]
        self.block_bytes: int = tensor[0].numel() * tensor.element_size()
        self.stride = self.block_bytes
        self.segment_blocks = self.num_blocks
        self.on_device = tensor.device.type == "cuda"


class CUDAPinning:
    """Pins host memory for one GPU, as `host.Pinning`."""

    def __init__(self, device: torch.device, driver: CUDADriver | None = None) -> None:
        self._index = device.index or 0
        self._driver = driver or CUDADriver()

    def pin(self, address: int, nbytes: int) -> None:
        self._driver.pin(self._index, address, nbytes)

    def unpin(self, address: int) -> None:
        self._driver.unpin(self._index, address)


class TorchCopyEngine(StreamCopyEngine):
    """Copies blocks between tensors ``[num_blocks, ...]`` and other memory of equal blocks.

    Pools on one CUDA device and in host memory may be mixed; copies that touch the device run on streams of their own
    and are only asynchronous for the caller when the host pool is pinned. "Compute" is the stream ``compute``, else
    the one that is current for the device in the calling thread; between CPU pools, what the calling thread has done.
    Raises `ValueError` for pools that do not match, and `OSError` where a CUDA device has no driver.
    """

    def __init__(
        self,
        pools: Mapping[str, torch.Tensor | BlockMemory],
        *,
        compute: torch.cuda.Stream | None = None,
        max_submit_bytes: int = MAX_SUBMIT_BYTES,
    ) -> None:
        memories = {
            name: TensorMemory(pool) if isinstance(pool, torch.Tensor) else pool for name, pool in pools.items()
        }
        super().__init__(memories, _device_of(memories.values(), compute), max_submit_bytes=max_submit_bytes)


def open_copies(
    kv: torch.Tensor, host: HostMemory | None = None, *, may_grow: Callable[[], bool] = lambda: True
) -> TorchCopyEngine:
    """The engine of an executor: pool ``device`` is its KV ``[num_blocks, ...]``, pool ``host`` the memory, which is
    opened here: pinned where the KV is on a GPU."""
    pools: dict[str, torch.Tensor | BlockMemory] = {"device": kv}
    if host is not None:
        host.open(CUDAPinning(kv.device) if kv.device.type == "cuda" else None, may_grow=may_grow)
        pools["host"] = host
    return TorchCopyEngine(pools)


def _device_of(memories: Iterable[BlockMemory], compute: torch.cuda.Stream | None) -> CopyDevice:
    devices = {each.tensor.device for each in memories if isinstance(each, TensorMemory) and each.on_device}
    if len(devices) > 1:
        raise ValueError(f"pools must be on the CPU and at most one CUDA device, got {sorted(map(str, devices))}")
    return CUDACopyDevice(devices.pop(), compute) if devices else HostCopyDevice()


class CUDACopyDevice:
    """Copy engines of one GPU: a stream for each direction, all pieces of a submit in one driver call where it can."""

    def __init__(
        self, device: torch.device, compute: torch.cuda.Stream | None = None, driver: CUDADriver | None = None
    ) -> None:
        self._device = device
        self._fixed = compute
        self.driver = driver or CUDADriver()

    def compute(self) -> torch.cuda.Stream:
        return self._fixed or torch.cuda.current_stream(self._device)

    def stream(self, direction: Direction) -> CopyStream:
        return _CUDACopyStream(self, self._device)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def seconds_between(self, begin: Event, end: Event) -> float:
        return float(_event(begin).elapsed_time(_event(end))) / 1e3

    def record_compute(self, event: Event) -> None:
        _event(event).record(self.compute())

    def gate_compute(self, event: Event) -> None:
        self.compute().wait_event(_event(event))

    def copy_now(self, parts: Sequence[Piece]) -> None:
        copy_now(parts)


class _CUDACopyStream:
    def __init__(self, device: CUDACopyDevice, where: torch.device) -> None:
        self._device = device
        # Priority 0 is the lowest; what a copy within the device launches must not come before a step's kernels.
        self._stream = torch.cuda.Stream(where, priority=0)  # type: ignore[no-untyped-call]
        # Who waits for an event waits for its last record before that: one serves for all submits.
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait_compute(self) -> None:
        self._computed.record(self._device.compute())
        self._stream.wait_event(self._computed)

    def wait_event(self, event: Event) -> None:
        self._stream.wait_event(_event(event))

    def copy(self, parts: Sequence[Piece]) -> None:
        self._device.driver.copy(parts, self._stream.cuda_stream)

    def record(self, event: Event) -> None:
        _event(event).record(self._stream)


def _event(event: Event) -> torch.cuda.Event:
    assert isinstance(event, torch.cuda.Event)
    return event
