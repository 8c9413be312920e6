"""How much memory an engine has taken at its peak."""

from __future__ import annotations

import resource

import torch


def peak_memory(device: str) -> int:
    """Bytes: of ``cpu`` the most that this process had resident, of another device the most that torch's allocator
    held of it since the process began (CUDA's own context is not in it). 0 where a backend does not tell."""
    if device == "cpu":
        return _peak_resident()
    try:
        return int(torch.get_device_module(device).max_memory_reserved())
    except (AttributeError, RuntimeError):
        return 0


def _peak_resident() -> int:
    # getrusage's figure begins with what the parent had when it forked; the kernel's own is of this program alone.
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
