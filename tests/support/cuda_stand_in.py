"""CUDA's driver as we call it, through C's calling convention: copies within host memory, and keeps account."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import SimpleNamespace

from firsttoken.kvcache.cuda_driver import DRIVER, _Attributes

STREAM = 0x7F00_1234_5678
BATCH = (POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t)
ATTRIBUTES = (POINTER(_Attributes), POINTER(c_size_t), c_size_t)


class StandIn:
    """``new`` and ``old``: which of the two batch calls it has; ``refuses`` makes those return an error."""

    def __init__(self, *, new: bool = True, old: bool = True, refuses: bool = False, fails: bool = False) -> None:
        self.batches: list[tuple[str, int]] = []
        self.single = 0
        self.refuses = refuses
        self.fails = fails
        self.pinned: dict[int, tuple[int, int]] = {}
        self.contexts: list[str] = []
        self.functions = SimpleNamespace(
            cuMemcpyAsync=CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(self._copy),
            cuMemHostRegister_v2=CFUNCTYPE(c_int, c_void_p, c_size_t, c_uint)(self._pin),
            cuMemHostUnregister=CFUNCTYPE(c_int, c_void_p)(lambda address: 0 if self.pinned.pop(address, 0) else 713),
            cuDevicePrimaryCtxRetain=CFUNCTYPE(c_int, POINTER(c_void_p), c_int)(self._retain),
            cuCtxSetCurrent=CFUNCTYPE(c_int, c_void_p)(lambda context: self._note(f"set {context}")),
            cuDevicePrimaryCtxRelease_v2=CFUNCTYPE(c_int, c_int)(lambda device: self._note(f"release {device}")),
        )
        if new:
            self.functions.cuMemcpyBatchAsync_v2 = CFUNCTYPE(c_int, *BATCH, *ATTRIBUTES, c_void_p)(
                lambda *given: self._batch("new", *given)
            )
        if old:
            self.functions.cuMemcpyBatchAsync = CFUNCTYPE(c_int, *BATCH, *ATTRIBUTES, POINTER(c_size_t), c_void_p)(
                lambda *given: self._batch("old", *given[:7], given[8])
            )

    def load(self, name: str) -> SimpleNamespace:
        assert name == DRIVER
        return self.functions

    def _note(self, what: str) -> int:
        self.contexts.append(what)
        return 0

    def _retain(self, context, device: int) -> int:
        context[0] = 4096 + device
        return self._note(f"retain {device}")

    def _pin(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = (nbytes, flags)
        return 2 if self.fails else 0

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == STREAM
        self.single += 1
        ctypes.memmove(target, source, nbytes)
        return 700 if self.fails else 0

    def _batch(self, which, targets, sources, sizes, count, attributes, firsts, num, stream) -> int:
        assert stream == STREAM
        assert (num, firsts[0]) == (1, 0)
        # In the stream's order, and rather beside compute; no hints.
        assert (attributes[0].source_order, attributes[0].flags, attributes[0].source_kind) == (1, 1, 0)
        if self.refuses:
            return 801
        for index in range(count):
            ctypes.memmove(targets[index], sources[index], sizes[index])
        self.batches.append((which, count))
        return 0
