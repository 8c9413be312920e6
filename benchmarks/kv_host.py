"""The host tier's own costs, on any machine: book-keeping, submitting copies, plain copies, growing.

    python -m benchmarks.kv_host [--output benchmarks/results/kv/host.json]

``submit``: host time of the copy engine for a shard of so many scattered blocks, on a device that does nothing, from
    `submit` to having seen it arrive; what the driver takes comes on top (``benchmarks.gpu.copies`` has all of it).
``runs``: a pool of 64 GiB for an 8B model, kept 95 % full of shards of 128 to 512 tokens that come and go at random:
    time to take one and give it back, and in how many runs it lies.
``copies``: a CPU's copies of shards of SmolLM2-135M's KV, scattered on one side, beside one copy of as many bytes.
``growth``: memory is locked by mlock in place of a GPU's driver. ``asked_ms`` is what the caller waits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from firsttoken.core.kv_format import BLOCK_TOKENS, KVFormat
from firsttoken.kvcache.copy import Piece
from firsttoken.kvcache.host import HostMemory, Run
from firsttoken.kvcache.host.run_allocator import RunAllocator
from firsttoken.kvcache.host_copy import HostCopyDevice
from firsttoken.kvcache.stream_copy import CopyStream, Direction, Event, StreamCopyEngine

SHARDS = (128, 256, 512)
LARGE = KVFormat(dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)  # Llama-3.1-8B
SMALL = KVFormat(dtype="bfloat16", layers=30, kv_heads=3, head_dim=64)  # SmolLM2-135M
GIB = 1 << 30


def best(work: Callable[[], object], rounds: int) -> float:
    """Seconds, the least of some rounds: others' work on the machine only adds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


class NothingStream:
    """Takes copies and does nothing with them."""

    def wait_compute(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def copy(self, parts: Sequence[Piece]) -> None:
        pass

    def record(self, event: Event) -> None:
        pass


class NothingDevice(HostCopyDevice):
    def stream(self, direction: Direction) -> CopyStream:
        return NothingStream()


class Addresses:
    """Blocks that are nowhere."""

    address, num_blocks, segment_blocks = 1 << 40, 4096, 4096
    block_bytes = stride = LARGE.bytes_per_block

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device


def submit(rounds: int) -> list[dict[str, float]]:
    engine = StreamCopyEngine({"device": Addresses(True), "host": Addresses(False)}, NothingDevice())
    scattered = random.Random(1).sample(range(4096), 32)
    rows = []
    for tokens in SHARDS:
        blocks = tokens // BLOCK_TOKENS
        pairs = list(zip(range(blocks), scattered[:blocks], strict=True))
        seconds = best(lambda pairs=pairs: engine.submit("host", "device", pairs).done(), rounds)  # type: ignore[misc]
        rows.append({"tokens": tokens, "blocks": blocks, "us": round(seconds * 1e6, 1)})
    return rows


def runs(operations: int) -> dict[str, float]:
    """Segments as host memory has them: 64 MiB."""
    rng = random.Random(2)
    pool = RunAllocator((64 << 20) // LARGE.bytes_per_block)
    pool.grow(64 * GIB // LARGE.bytes_per_block)
    held: list[list[Run]] = []
    while pool.num_free > pool.num_blocks // 20:
        held.append(pool.take(8 * rng.randint(1, 4)) or [])
    pieces, began = 0, time.perf_counter()
    for _ in range(operations):
        while (taken := pool.take(count := 8 * rng.randint(1, 4))) is None:
            gone = rng.randrange(len(held))
            held[gone], held[-1] = held[-1], held[gone]
            for run in held.pop():
                pool.give(run)
        held.append(taken)
        pieces += len(taken)
        assert sum(run.length for run in taken) == count
    seconds = time.perf_counter() - began
    return {
        "blocks": pool.num_blocks,
        "take_and_give_us": round(seconds / operations * 1e6, 2),
        "runs_a_shard": round(pieces / operations, 3),
    }


def copies(rounds: int) -> list[dict[str, float]]:
    count = 192
    pools = {name: HostMemory(count, SMALL.bytes_per_block) for name in ("device", "host")}
    for memory in pools.values():
        memory.open()
        memory.view(0, count)[:] = bytes(count * memory.stride)
    engine = StreamCopyEngine(pools, HostCopyDevice())
    scattered = random.Random(3).sample(range(count), count)
    rows = []
    for tokens in SHARDS:
        blocks = tokens // BLOCK_TOKENS
        shards = [
            list(zip(range(f, f + blocks), scattered[f : f + blocks], strict=True)) for f in range(0, 160, blocks)
        ]
        nbytes = len(shards) * blocks * SMALL.bytes_per_block

        def move(shards: list[list[tuple[int, int]]] = shards) -> None:
            for pairs in shards:
                engine.submit("device", "host", pairs)

        def at_once(nbytes: int = nbytes) -> None:
            ctypes.memmove(pools["host"].address, pools["device"].address, nbytes)

        rows.append(
            {
                "tokens": tokens,
                "gb_s": round(nbytes / best(move, rounds) / 1e9, 2),
                "one_copy_gb_s": round(nbytes / best(at_once, rounds) / 1e9, 2),
            }
        )
    return rows


class Locking:
    """Locks pages as a driver would pin them."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def pin(self, address: int, nbytes: int) -> None:
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unpin(self, address: int) -> None:
        pass  # with the mapping


def growth(gib: float) -> dict[str, float]:
    memory = HostMemory(int(gib * GIB) // LARGE.bytes_per_block, LARGE.bytes_per_block)
    began = time.perf_counter()
    memory.open(Locking())
    asked = time.perf_counter()
    while not memory.num_blocks and not memory.wait(0.0005):
        pass
    usable = time.perf_counter()
    memory.wait(60)
    grown = time.perf_counter()
    found = {
        "gib": round(memory.num_blocks * memory.stride / GIB, 2),
        "asked_ms": round((asked - began) * 1e3, 2),
        "first_blocks_ms": round((usable - began) * 1e3, 1),
        "s": round(grown - began, 2),
    }
    memory.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    quick = arguments.quick
    document = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "submit": submit(50 if quick else 3000),
        "runs": runs(1000 if quick else 100_000),
        "copies": copies(2 if quick else 300),
        "growth": growth(0.25 if quick else 1),
    }
    text = json.dumps(document, indent=1)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
