"""CUDA's context of the first GPU, made while torch is being imported: it takes the driver some hundred ms, and Python
has nothing to do with it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

DRIVER = "libcuda.so.1"


class EarlyContext:
    """Holds the device's primary context, the one that torch uses too, from a while after the making until `close`.

    What goes wrong is not told: torch will meet the same, and knows more about it.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._release: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._make, args=(load,), name="firsttoken-context", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give it up: it lives on when torch has taken it meanwhile. Idempotent."""
        self._thread.join()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _make(self, load: Callable[[str], Any]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            driver = load(DRIVER)
            device, context = ctypes.c_int(), ctypes.c_void_p()
            release = driver.cuDevicePrimaryCtxRelease_v2
            # Each returns 0 when it is done. ctypes lets other threads run meanwhile.
            if (
                driver.cuInit(0) == 0
                and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
                and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
            ):
                self._release = lambda: release(device)
