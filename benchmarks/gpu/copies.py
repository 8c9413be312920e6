"""KV copies between the GPU and host memory, and what they do to decode steps; managed memory beside them.

    python -m benchmarks.gpu.copies [MODEL] [--rows 8 64] [--output copies.json]
    python -m benchmarks.gpu.copies random:smollm2-135m --dry    # the same code on the CPU: its figures say nothing

The engine's own executor, captured steps, two in flight; its own copy engine, from its own thread. Parts of the result:

``growth``: how fast host memory is pinned, and how long asking for it took.
``shards``: GB/s each way for shards of so many tokens, scattered over the device pool and in one run on the host's
    side: many queued (``gb_s``) and one alone from submit to arrival (``alone_ms``), by a batch call and by a call for
    each block. ``calls`` are the driver's, ``submit_us`` the host's time, both for a shard.
``decode``: gaps between steps with copies going on all the time in either and both directions; ``ratio`` is of mean
    gaps to those without copies, which are measured before and after.
``restore``: a prompt of 8,192 tokens comes back: by slab copies, and from managed memory by prefetch (which has pages
    where copies have blocks). ``ms`` by the GPU's clock, alone and beside decode.
``pinning``: gaps while more host memory is being pinned.

Takes about a minute once the model's kernels are compiled. A part that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.managed import ManagedMemory
from firsttoken.bench.steps import Engine, StepsConfig, open_executor
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.kv_format import BLOCK_TOKENS, KVFormat
from firsttoken.core.plan import RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.executor.ahead.plan import GREEDY
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.executor.interface import Executor, StepHandle
from firsttoken.kvcache.copy import CopyEngine, CopyHandle, cut
from firsttoken.kvcache.host import HostMemory, HostPool, blocks_of
from firsttoken.kvcache.stream_copy import StreamCopyEngine
from firsttoken.kvcache.torch_copy import CUDACopyDevice, CUDAPinning

SETTLING = 8  # steps before those that count


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``context`` tokens of each row at first, ``steps`` that count; ``moving`` blocks for copies, of which ``queued``
    are kept under way; ``restored`` tokens; ``pinned`` blocks of the part with pinning."""

    rows: tuple[int, ...]
    context: int = 512
    steps: int = 120
    moving: int = 2048
    queued: int = 640
    restored: int = 8192
    pinned: int = 2048
    shards: tuple[int, ...] = (128, 256, 512)

    @property
    def length(self) -> int:
        return self.context + SETTLING + self.steps + 2

    @property
    def row_blocks(self) -> int:
        return max(self.rows) * -(-self.length // BLOCK_TOKENS)


DRY = {"context": 32, "steps": 4, "moving": 64, "queued": 8, "restored": 512, "pinned": 32, "shards": (128, 256)}


@dataclass
class Bench:
    """``free`` are device blocks that no row has, in random order; ``held`` as many host blocks, neighbours.
    ``live`` slots have a row."""

    engine: Engine
    copies: CopyEngine
    host: HostPool
    sizes: Sizes
    free: list[int]
    held: list[int]
    steps: int = 0
    live: int = 0
    on_gpu: bool = field(default_factory=torch.cuda.is_available)

    @property
    def executor(self) -> Executor:
        return self.engine.executor

    def pairs(self, source: str, first: int, count: int) -> list[tuple[int, int]]:
        device, host = self.free[first : first + count], self.held[first : first + count]
        return list(zip(device, host, strict=True) if source == "device" else zip(host, device, strict=True))


def kv_format(model: str, dry: bool) -> KVFormat:
    config = open_checkpoint(model).config
    dtype = "float32" if dry else "bfloat16"
    return KVFormat(dtype=dtype, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)


def make(model: str, sizes: Sizes, dry: bool) -> tuple[Bench, dict[str, Any]]:
    kv = kv_format(model, dry)
    args = EngineArgs(
        model=model,
        device="cpu" if dry else "cuda",
        dtype="float32" if dry else "auto",
        quantization="none" if dry else "auto",
        max_model_len=sizes.length,
        kv_memory=(sizes.row_blocks + sizes.moving + 1) * kv.bytes_per_block,
    )
    engine = open_executor(args, StepsConfig(max_rows=max(sizes.rows), max_context=sizes.context, max_prefill=64))
    memory = HostMemory(sizes.moving, kv.bytes_per_block)
    began = time.perf_counter()
    copies = engine.executor.copies(memory)
    asked = time.perf_counter()
    if not memory.wait(120) or memory.num_blocks < sizes.moving:
        raise RuntimeError(f"only {memory.num_blocks} of {sizes.moving} host blocks could be pinned")
    grown = time.perf_counter()
    free = list(range(sizes.row_blocks, sizes.row_blocks + sizes.moving))
    random.Random(1).shuffle(free)
    pool = HostPool(memory)
    held = blocks_of(pool.take(sizes.moving) or [])
    growth = {
        "gib": round(sizes.moving * memory.stride / 2**30, 2),
        "asked_ms": round((asked - began) * 1e3, 2),
        "s": round(grown - began, 2),
    }
    if isinstance(engine.executor, GraphExecutor):
        for rows in sizes.rows:
            engine.executor.capture(engine.executor.table.shape(rows, [], 0), GREEDY)
    return Bench(engine, copies, pool, sizes, free, held, on_gpu=not dry), growth


# ---------------------------------------------------------------- shards


def driver_calls(bench: Bench) -> int:
    device = getattr(bench.copies, "_device", None)
    return device.driver.calls if isinstance(device, CUDACopyDevice) else 0


def queued_shards(bench: Bench, source: str, target: str, blocks: int) -> dict[str, float]:
    """All of the moving blocks once, in shards that are queued together."""
    firsts = range(0, bench.sizes.moving - blocks + 1, blocks)
    calls, submitting = driver_calls(bench), 0.0
    began = time.perf_counter()
    handles: list[CopyHandle] = []
    for first in firsts:
        pairs = bench.pairs(source, first, blocks)
        at = time.perf_counter()
        handles.append(bench.copies.submit(source, target, pairs))
        submitting += time.perf_counter() - at
    handles[-1].wait()
    seconds = time.perf_counter() - began
    nbytes = len(handles) * blocks * bench.copies.block_bytes
    return {
        "gb_s": round(nbytes / seconds / 1e9, 2),
        "shards_per_s": round(len(handles) / seconds),
        "calls": round((driver_calls(bench) - calls) / len(handles), 2),
        "submit_us": round(submitting / len(handles) * 1e6, 1),
    }


def alone_ms(bench: Bench, source: str, target: str, blocks: int, repeat: int = 15) -> float:
    times = []
    for index in range(repeat):
        pairs = bench.pairs(source, index % 4 * blocks, blocks)
        began = time.perf_counter()
        bench.copies.submit(source, target, pairs).wait()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 4)


def shards(bench: Bench) -> list[dict[str, Any]]:
    found = []
    device = getattr(bench.copies, "_device", None)
    driver = device.driver if isinstance(device, CUDACopyDevice) else None
    batch = driver._batch if driver else None
    for way in ("batch", "call a block") if batch else ("call a block",):
        if driver:
            driver._batch = batch if way == "batch" else None
        for tokens in bench.sizes.shards:
            for source, target in (("host", "device"), ("device", "host")):
                blocks = tokens // BLOCK_TOKENS
                queued_shards(bench, source, target, blocks)
                best = max((queued_shards(bench, source, target, blocks) for _ in range(3)), key=lambda r: r["gb_s"])
                row = {"way": way, "tokens": tokens, "from": source, "to": target, **best}
                row["alone_ms"] = alone_ms(bench, source, target, blocks)
                found.append(row)
                print(row, flush=True)
    if driver:
        driver._batch = batch
    return found


# ---------------------------------------------------------------- decode


def decode(bench: Bench, rows: int, between: Callable[[], None] = lambda: None) -> list[float]:
    """Milliseconds between the results of steps in which ``rows`` requests decode; the host asks for the next step
    before it reads one, and calls ``between`` after each submit, as an engine would move KV."""
    sizes = bench.sizes
    per_row = -(-sizes.length // BLOCK_TOKENS)
    known = array("I", [i % bench.engine.vocab_size for i in range(sizes.context + 1)]).tobytes()
    greedy = SamplingParams(temperature=0.0)
    starts = [
        RowStart(slot, slot, known, sizes.context + 1, greedy, 0, list(range(slot * per_row, (slot + 1) * per_row)))
        for slot in range(rows)
    ]
    flying: list[StepHandle] = []
    ends: list[float] = []
    for step in range(SETTLING + sizes.steps):
        bench.steps += 1
        work = [RowWork(slot, sizes.context + step, 1, True) for slot in range(rows)]
        plan = StepPlan(step_id=bench.steps, work=work)
        if step == 0:
            plan = StepPlan(step_id=bench.steps, work=work, starts=starts, retire=list(range(bench.live)))
        flying.append(bench.executor.submit(plan))
        between()
        if len(flying) == 2:
            flying.pop(0).result()
            ends.append(time.perf_counter())
    flying.pop().result()
    bench.live = rows
    return [(b - a) * 1e3 for a, b in zip(ends[SETTLING - 1 :], ends[SETTLING:], strict=False)]


def gaps(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "mean_ms": round(statistics.mean(ordered), 4),
        "p50_ms": round(statistics.median(ordered), 4),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
        "max_ms": round(ordered[-1], 4),
    }


class Pump:
    """Keeps copies under way in some directions, each on blocks of its own, which no step uses."""

    def __init__(self, bench: Bench, directions: Sequence[tuple[str, str]]) -> None:
        self._bench = bench
        self._directions = directions
        self._share = bench.sizes.moving // max(1, len(directions))
        self._next = [0] * len(directions)
        self.submitted = 0
        self.spent_s = 0.0
        self.submits = 0

    def __call__(self) -> None:
        copies, sizes = self._bench.copies, self._bench.sizes
        blocks = min(copies.max_blocks, 32, self._share)
        for index, (source, target) in enumerate(self._directions):
            while copies.pending_bytes(source, target) < sizes.queued // len(self._directions) * copies.block_bytes:
                first = index * self._share + self._next[index]
                self._next[index] = (self._next[index] + blocks) % (self._share - blocks + 1)
                pairs = self._bench.pairs(source, first, blocks)
                began = time.perf_counter()
                copies.submit(source, target, pairs, beside_compute=True)
                self.spent_s += time.perf_counter() - began
                self.submits += 1
                self.submitted += blocks * copies.block_bytes

    def drain(self) -> int:
        """Bytes that had not arrived yet; waits for them."""
        copies = self._bench.copies
        left = sum(copies.pending_bytes(source, target) for source, target in self._directions)
        while any(copies.pending_bytes(source, target) for source, target in self._directions):
            time.sleep(1e-4)
        return left


WAYS: dict[str, tuple[tuple[str, str], ...]] = {
    "no copies": (),
    "host to device": (("host", "device"),),
    "device to host": (("device", "host"),),
    "both": (("host", "device"), ("device", "host")),
    "no copies again": (),
}


def decode_beside_copies(bench: Bench) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rows in bench.sizes.rows:
        alone = 0.0
        for way, directions in WAYS.items():
            pump = Pump(bench, directions)
            began = time.perf_counter()
            times = decode(bench, rows, pump)
            seconds = time.perf_counter() - began
            arrived = pump.submitted - pump.drain()
            found_gaps = gaps(times)
            alone = alone or found_gaps["mean_ms"]
            row: dict[str, Any] = {"rows": rows, "way": way, **found_gaps}
            row["ratio"] = round(found_gaps["mean_ms"] / alone, 4)
            if directions:
                row |= {"gb_s": round(arrived / seconds / 1e9, 2), "submits": pump.submits}
                row["submit_us"] = round(pump.spent_s / pump.submits * 1e6, 1)
            found.append(row)
            print(row, flush=True)
    return found


# ---------------------------------------------------------------- a restore, by slab copies and by managed memory


Span = Callable[[], float]  # milliseconds, once it is over


def restore_by_slabs(bench: Bench) -> Span:
    blocks, copies = bench.sizes.restored // BLOCK_TOKENS, bench.copies
    parts = cut(bench.pairs("host", 0, blocks), min(32, copies.max_blocks))
    mark = _marker(copies)
    began, first = time.perf_counter(), mark()
    handles = [copies.submit("host", "device", part, beside_compute=True) for part in parts]
    last = mark()

    def span() -> float:
        handles[-1].wait()
        wall = (time.perf_counter() - began) * 1e3
        return wall if first is None or last is None else elapsed_ms(first, last)

    return span


def _marker(copies: CopyEngine) -> Callable[[], torch.cuda.Event | None]:
    """Records an event on the GPU's stream of copies to the device."""
    stream = copies._line("in").stream if isinstance(copies, StreamCopyEngine) else None

    def mark() -> torch.cuda.Event | None:
        if stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream.record(event)
        return event

    return mark


def elapsed_ms(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    last.synchronize()
    return float(first.elapsed_time(last))


def restore_by_prefetch(memory: ManagedMemory, part: int) -> Span:
    first, last = memory.prefetch(part)
    return lambda: elapsed_ms(first, last)


def once(begin: Callable[[], Span], spans: list[Span], at: int) -> Callable[[], None]:
    """For `decode`: begins at its step number ``at``."""
    count = 0

    def between() -> None:
        nonlocal count
        count += 1
        if count == at:
            spans.append(begin())

    return between


def restores(bench: Bench) -> list[dict[str, Any]]:
    nbytes = bench.sizes.restored // BLOCK_TOKENS * bench.copies.block_bytes
    managed = ManagedMemory(nbytes) if bench.on_gpu else None
    ways: list[tuple[str, Callable[[], Span], Callable[[], None]]] = [
        ("slab copies", lambda: restore_by_slabs(bench), lambda: None)
    ]
    if managed is not None:
        memory = managed
        ways += [
            ("managed, one prefetch", lambda: restore_by_prefetch(memory, nbytes), memory.home),
            ("managed, prefetch of 64 MiB parts", lambda: restore_by_prefetch(memory, 64 << 20), memory.home),
        ]
    found = []
    for way, begin, prepare in ways:
        alone = []
        for _ in range(4):
            prepare()
            began = time.perf_counter()
            span = begin()
            asking = time.perf_counter() - began
            alone.append((span(), asking * 1e3))
        ms, asking_ms = min(alone[1:])
        row: dict[str, Any] = {"way": way, "tokens": bench.sizes.restored, "gib": round(nbytes / 2**30, 3)}
        row |= {"ms": round(ms, 3), "gb_s": round(nbytes / ms / 1e6, 2), "asking_ms": round(asking_ms, 3)}
        for rows in bench.sizes.rows:
            prepare()
            spans: list[Span] = []
            times = decode(bench, rows, once(begin, spans, SETTLING + bench.sizes.steps // 4))
            row[f"beside_{rows}_rows"] = {"ms": round(spans[0](), 3), **gaps(times)}
        found.append(row)
        print(row, flush=True)
    if managed is not None:
        managed.close()
    return found


# ---------------------------------------------------------------- pinning beside decode


def pinning(bench: Bench) -> dict[str, Any]:
    """Decode steps while another piece of host memory grows, until it has."""
    memory = HostMemory(bench.sizes.pinned, bench.copies.block_bytes)
    rows = bench.sizes.rows[0]
    memory.open(CUDAPinning(torch.device("cuda", torch.cuda.current_device())) if bench.on_gpu else None)
    during: list[float] = []
    while not memory.wait(0) or not during:
        during += decode(bench, rows)
    found = {"rows": rows, "steps": len(during), "gib": round(memory.num_blocks * memory.stride / 2**30, 2)}
    memory.close()
    return found | gaps(during)


PARTS: dict[str, Callable[[Bench], Any]] = {
    "shards": shards,
    "decode": decode_beside_copies,
    "restore": restores,
    "pinning": pinning,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--dry", action="store_true", help="on the CPU, small")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    small: dict[str, Any] = DRY if arguments.dry else {}
    sizes = Sizes(rows=tuple(arguments.rows), **small)
    began = time.perf_counter()
    bench, growth = make(arguments.model, sizes, arguments.dry)
    document: dict[str, Any] = {
        "gpu": None if arguments.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": arguments.model,
        "block_bytes": bench.copies.block_bytes,
        "growth": growth,
    }
    print(document, flush=True)
    failed = False
    for name in arguments.only:
        try:
            document[name] = PARTS[name](bench)
            print(f"{name}: done", flush=True)
        except Exception:
            failed = True
            document[name] = {"failed": traceback.format_exc().strip()[-1500:]}
            print(document[name]["failed"], flush=True)
        document["learned_gb_s"] = {
            f"{a} to {b}": round(bench.copies.gigabytes_per_s(a, b), 2)
            for a, b in (("host", "device"), ("device", "host"))
        }
        document["seconds"] = round(time.perf_counter() - began, 1)
        if arguments.output:
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print({"learned_gb_s": document.get("learned_gb_s"), "seconds": document.get("seconds")}, flush=True)
    bench.executor.close()
    bench.host.close()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
