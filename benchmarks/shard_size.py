"""The three-way trade-off of a shard's size: how long prefixes are, what memory they hold in vain, what handling costs.

    python -m benchmarks.shard_size azure_2023_conv.csv --output benchmarks/results/kv/shard_size.json \\
        --png benchmarks/results/kv/shard_size.png

Memory: requests with the lengths of Azure's conversations in 2023 (github.com/Azure/AzurePublicDataset) form a
synthetic prefix tree (`Conversations`, seed 1). A cache evicts the shard that was used longest ago and that nothing
continues. For each size the least capacity is sought that gives as many hit tokens as whole sequences do at
``--capacity``; what it spares is the memory saved. Whole sequences are told twice: sharing their beginnings, as shards
do, and each in a slab of its own, as caches of slots keep them.

Time: the index is the real `KVCache`, timed per shard as its size changes; a copy's start and the bandwidth are
parameters, an H200's by default.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

from benchmarks.shard_picture import Surface, draw_surfaces
from firsttoken.cli import report
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.shard_size import ShardCosts, added_us, prefix_cost_us, recommend_shard_tokens
from firsttoken.simulate.traces import read_trace

BLOCK = 16
WHOLE = 1 << 30
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

Path_ = list[tuple[int, int]]
"""A sequence as its segments: (identity, where it ends). A segment's identity stands for all that comes before it."""


class Conversations:
    """Each request goes on with a conversation (6 of 10) that is short enough, or begins one with one of 50 system
    prompts (of 64 to 1,024 tokens, popular as 1/rank). One in five that go on changes an earlier turn."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [(number, self._rng.randrange(64, 1025)) for number in range(50)]
        self._weights = [1 / (number + 1) for number in range(50)]
        self._next = 50
        self._recent: list[Path_] = []

    def request(self, prompt: int, answer: int) -> tuple[Path_, int]:
        """The whole sequence, and how many of its tokens are the prompt's."""
        path = self._begin(prompt)
        turn = prompt if prompt > path[-1][1] else path[-1][1]
        for end in (turn, turn + answer):
            if end > path[-1][1]:
                path.append((self._next, end))
                self._next += 1
        self._recent.append(path)
        if len(self._recent) > 400:
            del self._recent[0]
        return path, turn

    def _begin(self, prompt: int) -> Path_:
        if self._recent and self._rng.random() < 0.6:
            for _ in range(8):
                place = self._rng.randrange(len(self._recent))
                found = self._recent[place]
                if self._rng.random() < 0.2 and len(found) > 2:
                    found = found[: self._rng.randrange(1, len(found))]
                    if found[-1][1] < prompt:
                        return list(found)
                elif found[-1][1] < prompt:
                    del self._recent[place]
                    return list(found)
        number, length = self._rng.choices(self._systems, self._weights)[0]
        return [(number, min(length, prompt))] if length <= prompt else [(self._fresh(), prompt)]

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


class Node:
    """A shard: tokens ``begin`` to ``end`` of its chain, as segments; at most to ``limit``."""

    __slots__ = ("begin", "children", "end", "limit", "parent", "parts", "used")

    def __init__(self, parent: Node | None, begin: int, end: int, limit: int, parts: Path_) -> None:
        self.parent, self.begin, self.end, self.limit, self.parts = parent, begin, end, limit, parts
        self.children: list[Node] = []
        self.used = 0


class Cache:
    """Shards of ``size`` tokens under least-recently-used eviction, leaves only. Tokens count in whole blocks."""

    def __init__(self, size: int, capacity: int, *, share: bool = True) -> None:
        self._size, self._capacity, self._share = size, capacity, share
        self._root = Node(None, 0, 0, 0, [])
        # (last use, order of entries, shard); what was used since, or is continued, is passed over.
        self._leaves: list[tuple[int, int, Node]] = []
        self._tick = self._entries = 0
        self.resident = self.hits = 0

    def use(self, path: Path_, prompt: int) -> None:
        total = path[-1][1] // BLOCK * BLOCK
        used, at = self._find(path, total)
        self.hits += min(at, (prompt - 1) // BLOCK * BLOCK)
        node = used[-1] if used else self._root
        if at < total:
            begin = at if self._share or (used and at == node.end) else 0
            self._insert(node, path, begin, total, used)
        self._tick += 1
        self._used(used)
        for node in used:
            if not node.children:
                self._offer(node)
        while self.resident > self._capacity:
            self._evict()

    def _find(self, path: Path_, total: int) -> tuple[list[Node], int]:
        used: list[Node] = []
        node, at = self._root, 0
        while True:
            best, reach = None, at
            for child in node.children:
                if child.begin > at:  # a continuation of what follows where the path has left it
                    continue
                common = min(_common(child.parts, path), child.end, total) // BLOCK * BLOCK
                if common > reach:
                    best, reach = child, common
            if best is None:
                break
            used.append(best)
            node, at = best, reach
        return used, at

    def _insert(self, node: Node, path: Path_, begin: int, total: int, used: list[Node]) -> None:
        self.resident += total - begin
        if node.end == begin < node.limit and not node.children:
            end = min(node.limit, total)
            node.parts += _cut(path, begin, end)
            node.end = begin = end
        elif begin == 0:
            node = self._root
        while begin < total:
            limit = (begin // self._size + 1) * self._size
            end = min(limit, total)
            child = Node(node, begin, end, limit, _cut(path, begin, end))
            node.children.append(child)
            used.append(child)
            node, begin = child, end

    def _used(self, used: list[Node]) -> None:
        for node in used:
            node.used = self._tick

    def _offer(self, node: Node) -> None:
        self._entries += 1
        heapq.heappush(self._leaves, (node.used, self._entries, node))

    def _evict(self) -> None:
        used, _, node = heapq.heappop(self._leaves)
        if node.used == used and not node.children and node.parent is not None:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "the root is no shard"
        self.resident -= node.end - node.begin
        node.parent = None
        parent.children.remove(node)
        if not parent.children and parent is not self._root:
            self._offer(parent)


def _cut(path: Path_, begin: int, end: int) -> Path_:
    return [(name, min(stop, end)) for (name, stop), start in zip(path, [0, *(e for _, e in path)], strict=False)
            if stop > begin and start < end]  # fmt: skip


def _common(parts: Path_, path: Path_) -> int:
    """How far ``path`` agrees with the segments of a shard."""
    ends = dict(path)
    reach = 0
    for name, end in parts:
        stop = ends.get(name)
        if stop is None:
            break
        reach = min(end, stop)
    return reach


def replay(requests: list[tuple[Path_, int]], size: int, capacity: int, *, share: bool = True) -> int:
    """Hit tokens."""
    cache = Cache(size, capacity, share=share)
    for path, prompt in requests:
        cache.use(path, prompt)
    return cache.hits


def least_capacity(requests: list[tuple[Path_, int]], size: int, hits: int, most: int) -> int:
    """Tokens, to within 1 %, at which shards of that size give as many hits."""
    low, high = most // 8, most
    while high - low > most // 100:
        middle = (low + high) // 2
        if replay(requests, size, middle) >= hits:
            high = middle
        else:
            low = middle
    return high


def index_us(size: int, length: int, rounds: int) -> float:
    """What the real cache takes for a request of that length: found, admitted, registered and given back, with another
    one's shards evicted for it."""
    form = KVFormat(dtype="bfloat16", layers=1, kv_heads=1, head_dim=16)
    kv = KVCache(form, 4 * length // BLOCK, model="m", shard_tokens=lambda request: size)
    times = []
    for number in range(rounds):
        request = _request(number, length)
        began = time.perf_counter_ns()
        for _ in range(2):  # computed, then found again
            admission = kv.admit(request, kv.probe(request))
            assert admission is not None, "nothing else holds blocks"
            request.num_computed = length
            kv.commit(request)
            kv.release(request)
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e3


def _request(number: int, length: int) -> Request:
    tokens = array("I", [number * length + i for i in range(length)])
    return Request(EngineRequest(id=number, prompt=tokens.tobytes(), params=SamplingParams(), seed=0, max_tokens=1))


def measure_memory(requests: list[tuple[Path_, int]], capacity: int) -> dict[str, Any]:
    hits = replay(requests, WHOLE, capacity)
    slabs = replay(requests, WHOLE, capacity, share=False)
    rows = []
    for size in SIZES:
        least = least_capacity(requests, size, hits, capacity)
        least_slab = least_capacity(requests, size, slabs, capacity)
        rows.append(
            {
                "shard_tokens": size,
                "saved": round(1 - least / capacity, 3),
                "saved_slabs": round(1 - least_slab / capacity, 3),
            }
        )
        print(rows[-1], flush=True)
    prompts = sum(prompt for _, prompt in requests)
    return {
        "capacity_tokens": capacity,
        "prompt_tokens": prompts,
        "hit_share_whole": round(hits / prompts, 3),
        "hit_share_slabs": round(slabs / prompts, 3),
        "sizes": rows,
    }


def measure_index(length: int, rounds: int) -> dict[str, Any]:
    """The slope of the time for a request over its number of shards; the least of five medians at each size."""
    times = {size: min(index_us(size, length, rounds) for _ in range(5)) for size in (32, 128, 512, 2048)}
    fine, coarse = min(times), max(times)
    slope = (times[fine] - times[coarse]) / (length / fine - length / coarse)
    return {
        "length": length,
        "request_us": {str(size): round(us, 1) for size, us in times.items()},
        "shard_us": round(slope / 2, 2),  # of two uses, the first of which makes it
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000, help="the first ones of the trace")
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[50_000, 200_000], help="tokens of the cache of whole sequences"
    )
    parser.add_argument("--copy-us", type=float, default=10.0, help="the fixed part of a copy")
    parser.add_argument("--token-us", type=float, default=21.0, help="to compute a token")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    tree = Conversations(seed=1)
    requests = [tree.request(job.input, job.output) for job in read_trace(options.trace)[: options.requests]]
    memory = [measure_memory(requests, capacity) for capacity in options.capacity]
    index = measure_index(8192, 60)
    costs = ShardCosts(
        index_us=index["shard_us"],
        copy_us=options.copy_us,
        token_us=round(options.token_us * memory[-1]["hit_share_whole"], 2),
    )
    table = [
        {
            "length": length,
            "added_ms": {str(size): round(added_us(length, size, costs) / 1e3, 3) for size in SIZES},
            "recommended": {str(uses): recommend_shard_tokens(length, uses, costs) for uses in (1, 2, 8)},
        }
        for length in LENGTHS
    ]
    result = report.header(trace=options.trace.name, requests=len(requests), seed=1) | {
        "memory": memory,
        "index": index,
        "costs_us": {name: getattr(costs, name) for name in costs.__struct_fields__},
        "table": table,
    }
    print(json.dumps({"index": index, "costs": result["costs_us"], "table": table}, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.png:
        draw(options.png, memory[-1], costs)


def draw(path: Path, memory: dict[str, Any], costs: ShardCosts) -> None:
    saved = {row["shard_tokens"]: 100 * row["saved"] for row in memory["sizes"]}
    sizes, lengths = [str(size) for size in SIZES], [str(length) for length in LENGTHS]
    surfaces = [
        Surface("added by handling (ms)", [[added_us(n, size, costs) / 1e3 for size in SIZES] for n in LENGTHS]),
        Surface("cost of a prefix used twice (ms)",
                [[prefix_cost_us(n, 2, size, costs) / 1e3 for size in SIZES] for n in LENGTHS]),
    ]  # fmt: skip
    lines = ", ".join(f"{size}: {percent:.0f}%" for size, percent in saved.items())
    draw_surfaces(path, f"memory saved at equal hits, by tokens a shard: {lines}", lengths, sizes, surfaces)


if __name__ == "__main__":
    main()
