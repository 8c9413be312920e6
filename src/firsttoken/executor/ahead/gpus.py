"""What of a GPU decides how kernels are compiled for it. Torch-free."""

from __future__ import annotations

import re

import msgspec

from firsttoken.core.errors import ConfigError

GIB = 1 << 30


class GPU(msgspec.Struct, frozen=True):
    """``name`` as the driver says it, ``capability`` as in ``sm_90``, multiprocessors, and memory in bytes."""

    name: str
    capability: int
    sms: int
    memory: int


# Under the names that `firsttoken warm --gpu` takes. The last ones stand for any GPU of their generation: configs
# measured on one model are not used for them.
KNOWN: dict[str, GPU] = {
    "h200": GPU("NVIDIA H200", 90, 132, 140 * GIB),
    "h100": GPU("NVIDIA H100 80GB HBM3", 90, 132, 79 * GIB),
    "a100": GPU("NVIDIA A100-SXM4-80GB", 80, 108, 79 * GIB),
    "l40s": GPU("NVIDIA L40S", 89, 142, 44 * GIB),
    "l4": GPU("NVIDIA L4", 89, 58, 22 * GIB),
    "a10g": GPU("NVIDIA A10G", 86, 80, 22 * GIB),
    "rtx-4090": GPU("NVIDIA GeForce RTX 4090", 89, 128, 23 * GIB),
    "sm80": GPU("sm80", 80, 108, 39 * GIB),
    "sm86": GPU("sm86", 86, 84, 23 * GIB),
    "sm89": GPU("sm89", 89, 128, 23 * GIB),
    "sm90": GPU("sm90", 90, 132, 79 * GIB),
}


def known_gpu(name: str) -> GPU:
    """The GPU of that name in `KNOWN`, however its words are joined; raises `ConfigError` for another."""
    joined = {known.replace("-", ""): gpu for known, gpu in KNOWN.items()}
    found = joined.get(re.sub(r"[-_ ]", "", name.lower()))
    if found is None:
        raise ConfigError(f"gpu must be one of {', '.join(KNOWN)}, got {name!r}")
    return found
