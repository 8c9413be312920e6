"""What copying needs of CUDA's driver and torch does not offer: many copies in one call, and pinning memory in place.

Bound by hand to the driver's library, which is there wherever a GPU is, whatever runtime torch was built with. A call
through ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

from firsttoken.kvcache.copy import Piece

DRIVER = "libcuda.so.1"
# For all contexts of the process, as torch pins.
_PORTABLE = 1
_IN_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1

log = logging.getLogger(__name__)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which sources are read, hints for managed memory (unused), and flags."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_kind", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_kind", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class CUDADriver:
    """Raises `OSError` where there is no driver. ``calls`` counts those that copy.

    A batch is one call from CUDA 12.8 on (its signature changed with 13.0, under a new name); older drivers, and one
    that refuses a batch, get a call for each piece.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._driver = load(DRIVER)
        self._batch = self._find_batch()
        self.calls = 0

    @property
    def batches(self) -> bool:
        """Whether a scattered copy is one call."""
        return self._batch is not None

    def copy(self, parts: Sequence[Piece], stream: int) -> None:
        """Give all pieces to a stream (its raw handle, not the default one). Raises `RuntimeError` with CUDA's code."""
        if len(parts) > 1 and self._batch is not None:
            self.calls += 1
            code = self._batch(parts, ctypes.c_void_p(stream))
            if not code:
                return
            log.warning("the driver refuses copies in a batch (CUDA error %d): from now on a call for each", code)
            self._batch = None
        copy, handle = self._driver.cuMemcpyAsync, ctypes.c_void_p(stream)
        for part in parts:
            self.calls += 1
            code = copy(_pointer(part.target), _pointer(part.source), ctypes.c_size_t(part.nbytes), handle)
            if code:
                raise RuntimeError(f"copying {part.nbytes} bytes of KV failed with CUDA error {code}")

    def pin(self, device: int, address: int, nbytes: int) -> None:
        """Lock pages in memory and map them for the GPU. Raises `OSError` with CUDA's code when it cannot."""
        self._make_current(device)
        code = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
        )
        if code:
            raise OSError(f"pinning {nbytes} bytes of host memory failed with CUDA error {code}")

    def unpin(self, device: int, address: int) -> None:
        self._make_current(device)
        code = self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        if code:
            raise OSError(f"unpinning host memory failed with CUDA error {code}")

    def _make_current(self, device: int) -> None:
        """The context that torch uses, for a thread that has done nothing with CUDA yet. Torch's own hold on it keeps
        it alive, so ours is given back at once."""
        driver, context = self._driver, ctypes.c_void_p()
        code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(device))
        if not code:
            code = driver.cuCtxSetCurrent(context)
            driver.cuDevicePrimaryCtxRelease_v2(ctypes.c_int(device))
        if code:
            raise OSError(f"the context of GPU {device} cannot be used: CUDA error {code}")

    def _find_batch(self) -> Callable[[Sequence[Piece], ctypes.c_void_p], int] | None:
        for name, failed in (("cuMemcpyBatchAsync_v2", ()), ("cuMemcpyBatchAsync", (ctypes.byref(ctypes.c_size_t()),))):
            call = getattr(self._driver, name, None)
            if call is not None:
                return lambda parts, stream, call=call, failed=failed: _call_batch(call, parts, failed, stream)  # type: ignore[misc]
        return None


def _call_batch(call: Any, parts: Sequence[Piece], failed: tuple[Any, ...], stream: ctypes.c_void_p) -> int:
    count = len(parts)
    targets = (ctypes.c_uint64 * count)(*[part.target for part in parts])
    sources = (ctypes.c_uint64 * count)(*[part.source for part in parts])
    sizes = (ctypes.c_size_t * count)(*[part.nbytes for part in parts])
    attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
    first = (ctypes.c_size_t * 1)(0)  # the attributes hold from piece 0 on
    one = ctypes.c_size_t(1)
    return int(
        call(targets, sources, sizes, ctypes.c_size_t(count), ctypes.byref(attributes), first, one, *failed, stream)
    )


def _pointer(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)
