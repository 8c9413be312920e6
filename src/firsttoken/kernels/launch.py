"""Starting Triton kernels: on the GPU, under Triton's interpreter, or only compiling them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def interpreted() -> bool:
    """True when Triton runs kernels in its interpreter (``TRITON_INTERPRET=1``), as tests without a GPU do."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *args: Any, pdl: bool, **options: Any) -> None:
    """Run ``kernel`` on ``grid`` with ``first`` and ``args``; ``options`` are constexprs, warps and stages.

    ``pdl`` makes it a programmatic dependent launch and is handed to the kernel as ``PDL``. When ``first`` is a meta
    tensor the kernel is compiled for the active target and kept in Triton's cache, but not run.
    """
    if interpreted():
        kernel[grid](first, *args, PDL=False, **options)
    elif first.is_meta:
        kernel.warmup(first, *args, grid=grid, PDL=pdl, launch_pdl=pdl, **options)
    else:
        kernel[grid](first, *args, PDL=pdl, launch_pdl=pdl, **options)
