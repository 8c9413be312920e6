"""CUDA's managed memory, to be compared with copies (`benchmarks.gpu.copies`)."""

from __future__ import annotations

import ctypes

import torch


class ManagedMemory:
    """Memory that the driver moves between host and GPU by itself, or when told (``prefetch``)."""

    GLOBAL, HOST = 1, -1

    def __init__(self, nbytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._pointer = ctypes.c_uint64()
        self.nbytes = nbytes
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        code = self._driver.cuMemAllocManaged(
            ctypes.byref(self._pointer), ctypes.c_size_t(nbytes), ctypes.c_uint(self.GLOBAL)
        )
        if code:
            raise RuntimeError(f"managed memory cannot be had: CUDA error {code}")

    def home(self) -> None:
        """Back to the host, all of it."""
        ctypes.memset(self._pointer.value or 0, 1, self.nbytes)

    def prefetch(self, part: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Ask for all of it on the GPU, in parts of so many bytes; events before and behind."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record(self._stream)
        for first in range(0, self.nbytes, part):
            code = self._driver.cuMemPrefetchAsync(
                ctypes.c_uint64((self._pointer.value or 0) + first),
                ctypes.c_size_t(min(part, self.nbytes - first)),
                ctypes.c_int(torch.cuda.current_device()),
                ctypes.c_void_p(self._stream.cuda_stream),
            )
            if code:
                raise RuntimeError(f"a prefetch failed with CUDA error {code}")
        events[1].record(self._stream)
        return events[0], events[1]

    def close(self) -> None:
        torch.cuda.synchronize()
        self._driver.cuMemFree_v2(self._pointer)
