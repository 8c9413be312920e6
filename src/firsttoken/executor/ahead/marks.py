"""A note in Triton's cache that an order was carried out: the next engine like it need not have it compiled again."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from pathlib import Path

import msgspec

from firsttoken.executor.ahead.messages import Order


def cache_folder() -> Path:
    """Where Triton keeps what it compiles; imports Triton."""
    from triton import knobs

    return Path(knobs.cache.dir)


def is_done(order: Order) -> bool:
    """Whether all of the order was compiled before, by this code and this Triton, and not thrown away since."""
    return _place(order).is_file()


def mark_done(order: Order) -> None:
    place = _place(order)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")


def _place(order: Order) -> Path:
    # Neither how much memory there is nor how it is done changes a kernel.
    alike = msgspec.structs.replace(
        order,
        executor=dataclasses.replace(order.executor, kv_blocks=1, threads=1, adaptive_threads=False),
        gpu=msgspec.structs.replace(order.gpu, memory=0),
        processes=1,
        quietly=False,
    )
    digest = hashlib.sha256(msgspec.json.encode(alike) + _code().encode()).hexdigest()
    return cache_folder() / f"firsttoken-{digest[:32]}.compiled"


@functools.cache
def _code() -> str:
    """What compiles, by version, and the files that say what is to be compiled, by name, size and time."""
    import triton

    root = Path(__file__).resolve().parents[2]
    files = sorted(path for room in ("kernels", "models", "executor", "sampling") for path in (root / room).rglob("*"))
    stats = [(str(path.relative_to(root)), os.stat(path)) for path in files if path.suffix in (".py", ".json")]
    return repr((triton.__version__, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]))
