"""Triton told to compile for a GPU that this process never touches; imports Triton."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget


class CompileOnlyDriver:
    """Stands where Triton's CUDA driver would, for compiling alone: kernels are made for the capability, none runs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> None:
    """From here on this process compiles for ``sm_<capability>`` and cannot run kernels."""
    triton.runtime.driver.set_active(CompileOnlyDriver(capability))
