"""How fast the disk tier of the KV cache writes, reads, checks and starts, beside plain reads of the same files.

For each shard size, number of threads and way to the disk, ``--megabytes`` of shards are put, then read back cold: the
page cache is told to forget them (what lies beneath the machine may still remember). Figures are the best of
``--rounds``, as others' work on the machine only adds. GB/s are of all shards together, from the first `put` or `get`
to the last handle; the first byte's time is a lone shard's, from opening its file to its first page. *plain* is one
thread that reads the same files into memory through the page cache, with no checksum and no comparison: cold, and
again from the cache.

    python -m benchmarks.kv_disk --folder /path/on/the/disk --json > benchmarks/results/kv/disk.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from firsttoken.cli.report import header
from firsttoken.core.identity import Identity
from firsttoken.kvcache.disk import DiskConfig, DiskStore, Outcome, ShardMeta, aligned_buffer, buffers

MIB = 1 << 20
IDENTITY = Identity(model="benchmark", kv_format="none")
SIZES = (2, 8, 16, 64)
THREADS = (1, 2, 4)
SPANS = (1, 4, 16, 64)
TOKENS = 128
CALLS = 2000


def shard(number: int) -> ShardMeta:
    key = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return ShardMeta(key, bytes(32), 0, bytes(4 * TOKENS))


def seconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


@contextmanager
def store_in(folder: Path, **options: Any) -> Iterator[DiskStore]:
    config = DiskConfig(folder=folder, cap_bytes=1 << 40, max_reads=1 << 20, max_writes=1 << 20, **options)
    store = DiskStore(config, IDENTITY)
    store.scanned()
    try:
        yield store
    finally:
        store.close()


def forget(folder: Path) -> list[Path]:
    """Tell the page cache to drop all shards; their files."""
    paths = sorted(folder.rglob("*.kv"))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return paths


def wait_all(handles: list[Any]) -> None:
    outcomes = {handle.wait() for handle in handles}
    if outcomes != {Outcome.DONE}:
        raise RuntimeError(f"not all transfers ended well: {sorted(map(str, outcomes))}")


def transfers(
    place: Path, memory: memoryview, size: int, count: int, *, threads: int, direct: bool
) -> dict[str, float]:
    """One round: ``count`` shards of ``size`` bytes of ``memory`` there and back."""
    # A pool's pages are there before the first transfer, so these are, too.
    source, target = memory[: size * count], aligned_buffer(size * count)
    target[:] = bytes(target.nbytes)
    parts = [(shard(n), slice(n * size, (n + 1) * size)) for n in range(count)]
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        with store_in(folder, threads=threads, direct=direct) as store:
            if direct and not store.stats().direct:
                raise RuntimeError(f"there is no O_DIRECT in {place}; name another folder by --folder")
            written = seconds(lambda: wait_all([store.put(meta, source[part]) for meta, part in parts]))
            paths = forget(folder)
            read = seconds(lambda: wait_all([store.get(meta, target[part]) for meta, part in parts]))
            if target != source:
                raise RuntimeError("what was read is not what was written")
        with store_in(folder, threads=threads, direct=direct) as store:
            forget(folder)  # the store has looked at the headers
            meta, part = parts[0]
            alone = seconds(lambda: wait_all([store.get(meta, target[part])]))
            first_byte_ms = store.stats().first_byte_ms or 0.0
        forget(folder)
        cold = seconds(lambda: plain(paths, target))
        warm = seconds(lambda: plain(paths, target))
    total = size * count / 1e9
    return {
        "write_gb_s": total / written,
        "read_gb_s": total / read,
        "alone_ms": alone * 1e3,
        "first_byte_ms": first_byte_ms,
        "plain_cold_gb_s": total / cold,
        "plain_warm_gb_s": total / warm,
    }


def plain(paths: list[Path], into: memoryview) -> None:
    begin = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            file.seek(4096)
            begin += file.readinto(into[begin:]) or 0


def filled(nbytes: int) -> memoryview:
    memory = aligned_buffer(nbytes)
    memory[:] = os.urandom(nbytes)
    return memory


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    pick: dict[bool, Callable[[list[float]], float]] = {True: min, False: max}
    return {name: round(pick[name.endswith("_ms")]([one[name] for one in rounds]), 3) for name in rounds[0]}


def checksums() -> dict[str, float]:
    """GB/s of one thread over 64 MiB in spans of 4 MiB, the best of five."""

    def run(check: Callable[[memoryview], object], spans: list[memoryview]) -> None:
        for span in spans:
            check(span)

    data = filled(64 * MIB)
    spans = [data[begin : begin + 4 * MIB] for begin in range(0, data.nbytes, 4 * MIB)]
    kinds: dict[str, Callable[[memoryview], object]] = {
        "crc32": zlib.crc32,
        "adler32": zlib.adler32,
        "blake2b": hashlib.blake2b,
        "sha256": hashlib.sha256,
    }
    return {
        name: round(data.nbytes / min(seconds(partial(run, check, spans)) for _ in range(5)) / 1e9, 2)
        for name, check in kinds.items()
    }


def spans(place: Path, memory: memoryview, rounds: int) -> dict[str, float]:
    """GB/s of reading and checking 64 MiB by one thread with O_DIRECT, by MiB of a system call."""
    usual = buffers.SPAN_BYTES
    found = {}
    try:
        for span in SPANS:
            buffers.SPAN_BYTES = span * MIB
            some = [transfers(place, memory, 64 * MIB, 2, threads=1, direct=True) for _ in range(rounds)]
            found[str(span)] = best(some)["read_gb_s"]
    finally:
        buffers.SPAN_BYTES = usual
    return found


def start(place: Path, files: int) -> dict[str, float]:
    """What a folder of so many shards costs a store that starts, and the engine's thread its calls."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        one = filled(4096)
        with store_in(folder, threads=2, sync=False) as store:
            wait_all([store.put(shard(n), one) for n in range(files)])
        os.sync()
        forget(folder)
        with store_in(folder, threads=2) as store:
            scan_s = store.stats().scan_s or 0.0
            if store.stats().files != files:
                raise RuntimeError(f"{store.stats().files} of {files} files were found")
            into = aligned_buffer(CALLS * 4096)
            there = [(shard(n), into[n * 4096 : (n + 1) * 4096]) for n in range(CALLS)]
            others = [(shard(files + n), part) for n, (_, part) in enumerate(there)]
            contains = seconds(lambda: [store.contains(meta.key) for meta, _ in there])
            absent = seconds(lambda: [store.get(meta, part) for meta, part in others])
            handles: list[Any] = []
            get = seconds(lambda: handles.extend(store.get(meta, part) for meta, part in there))
            wait_all(handles)
    return {
        "files": files,
        "scan_ms": round(scan_s * 1e3, 1),
        "contains_us": round(contains / CALLS * 1e6, 2),
        "get_absent_us": round(absent / CALLS * 1e6, 2),
        "get_us": round(get / CALLS * 1e6, 2),
    }


def measure(place: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    memory = filled(max(megabytes, 2 * max(SIZES)) * MIB)
    table = []
    for size in SIZES:
        for threads in THREADS:
            for direct in (True, False):
                count = max(2, megabytes // size)
                some = [
                    transfers(place, memory, size * MIB, count, threads=threads, direct=direct) for _ in range(rounds)
                ]
                table.append({"mib": size, "threads": threads, "direct": direct, **best(some)})
                print(table[-1], file=sys.stderr, flush=True)
    return {
        "checksum_gb_s": checksums(),
        "span_mib_read_gb_s": spans(place, memory, rounds),
        "start": start(place, 10_000),
        "transfers": table,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=256, help="MiB of shards a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    args = parser.parse_args()
    figures = measure(args.folder, args.megabytes, args.rounds)
    if args.json:
        print(json.dumps(header(model="none", megabytes=args.megabytes, rounds=args.rounds) | figures, indent=1))
    else:
        for name in ("checksum_gb_s", "span_mib_read_gb_s", "start"):
            print(name, figures[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
