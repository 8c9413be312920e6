"""The copy engine for torch tensors. The one file of this room that imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from firsttoken.kvcache.copy import CopyHandle, check_pairs, runs


class DoneCopy:
    """A copy between CPU tensors: it has happened when ``submit`` returns, before any later compute."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def gate_compute(self) -> None:
        return


class StreamCopy:
    """A copy on the copy stream of a CUDA device; its event is recorded behind it."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self.device = device

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def gate_compute(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class TorchCopyEngine:
    """Copies blocks between tensors ``[num_blocks, ...]``, contiguous, of equal block shape and dtype.

    Pools on one CUDA device and in host memory may be mixed; copies that touch the device run on a stream of their
    own, beside compute, and are only asynchronous for the caller when the host pool is pinned. "Compute" is the
    stream that is current for the device in the calling thread; between CPU pools, what the calling thread has done.
    Raises `ValueError` for pools that do not match.
    """

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        if not pools:
            raise ValueError("a copy engine needs at least one pool")
        self._pools = dict(pools)
        self._check_pools()
        devices = {pool.device for pool in self._pools.values() if pool.device.type != "cpu"}
        if len(devices) > 1 or any(device.type != "cuda" for device in devices):
            raise ValueError(f"pools must be on the CPU and at most one CUDA device, got {sorted(map(str, devices))}")
        self._device = next(iter(devices), None)
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _check_pools(self) -> None:
        first_name, first = next(iter(self._pools.items()))
        for name, pool in self._pools.items():
            if pool.ndim < 2 or not pool.is_contiguous():
                raise ValueError(
                    f"pool {name!r} must be a contiguous [num_blocks, ...] tensor, got shape {tuple(pool.shape)} with "
                    f"strides {pool.stride()}"
                )
            if pool.shape[1:] != first.shape[1:] or pool.dtype != first.dtype:
                raise ValueError(
                    f"blocks of pool {name!r} are {tuple(pool.shape[1:])} {pool.dtype}, those of {first_name!r} "
                    f"{tuple(first.shape[1:])} {first.dtype}; they must be equal"
                )

    def num_blocks(self, pool: str) -> int:
        return self._pools[pool].shape[0]

    def submit(
        self, source: str, target: str, pairs: Sequence[tuple[int, int]], *, after: Sequence[CopyHandle] = ()
    ) -> CopyHandle:
        origin, destination = self._pools[source], self._pools[target]
        check_pairs(pairs, origin.shape[0], destination.shape[0], same_pool=origin is destination)
        on_device = [pool.device for pool in (origin, destination) if pool.device.type == "cuda"]
        if not on_device or self._stream is None:
            for handle in after:
                handle.wait()
            _copy_runs(origin, destination, pairs)
            return DoneCopy()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for handle in after:
            if isinstance(handle, StreamCopy):
                stream.wait_event(handle.event)
            else:
                handle.wait()
        with torch.cuda.stream(stream):
            _copy_runs(origin, destination, pairs)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return StreamCopy(event, on_device[0])


def _copy_runs(origin: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    with torch.no_grad():
        for first, to, count in runs(pairs):
            destination[to : to + count].copy_(origin[first : first + count], non_blocking=True)
