"""Starting Triton kernels: on the GPU, under Triton's interpreter, or only compiling them."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor


@functools.cache
def interpreted() -> bool:
    """True when Triton runs kernels in its interpreter (``TRITON_INTERPRET=1``), as tests without a GPU do.

    Triton decides when a kernel is defined, so the answer holds for the process; to ask it costs microseconds.
    """
    import triton

    return bool(triton.knobs.runtime.interpret)


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up. Triton's own costs a hundred times as much: it also serves inside kernels."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` (1 or more)."""
    return 1 << (n - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *args: Any, pdl: bool, **options: Any) -> None:
    """Run ``kernel`` on ``grid`` with ``first`` and ``args``; ``options`` are constexprs, warps and stages.

    ``pdl`` makes it a programmatic dependent launch and is handed to the kernel as ``PDL``. When ``first`` is a meta
    tensor the kernel is compiled for the active target and kept in Triton's cache, but not run.
    """
    if interpreted():
        kernel[grid](first, *args, PDL=False, **options)
        return
    if kernel.hash is None:
        settle_hash(kernel)
    if first.is_meta:
        kernel.warmup(first, *args, grid=grid, PDL=pdl, launch_pdl=pdl, **options)
    else:
        kernel[grid](first, *args, PDL=pdl, launch_pdl=pdl, **options)


def settle_hash(function: Any) -> None:
    """Let Triton hash ``function``, a kernel or what one calls, after everything that it calls.

    Triton 3.6 puts the constants that a called function uses into its caller's hash only if it has hashed the called
    function before. So what a kernel is kept under would depend on which kernels the process met earlier, and a cache
    filled by one process would not serve another.
    """
    for name in function.fn.__code__.co_names:
        called = function.__globals__.get(name)
        # Asked of the class, for the attribute itself is made on being read.
        if called is not function and hasattr(type(called), "cache_key") and called.hash is None:
            settle_hash(called)
    assert function.cache_key
