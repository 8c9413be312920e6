"""The memory that shards save under the engine's own eviction policy: part of ``benchmarks/shard_size.py``.

The same tree of conversations, at the trace's times. Who evicts whole sequences does so by last use, or by the engine's
policy too; shards are evicted by the engine's.

    python -m benchmarks.shard_policy azure_2023_conv.csv --output benchmarks/results/kv/shard_policy.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.shard_size import WHOLE, Cache, Conversations, Node, Path_
from firsttoken.cli import report
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import EvictionPolicy, Shard, make_policy
from firsttoken.simulate.traces import read_trace

SIZES = (128, 512)


class Ranked(Shard):
    """A node as a policy sees it."""

    __slots__ = ("node", "offered")

    def __init__(self, key: bytes, node: Node) -> None:
        super().__init__(key, node.begin, node.end - node.begin, node.end - node.begin)
        self.node = node
        self.offered = False


class PolicyCache(Cache):
    """As `Cache`, under a policy. Slabs that are not shared are told apart by their request."""

    def __init__(self, size: int, capacity: int, policy: EvictionPolicy, *, share: bool) -> None:
        super().__init__(size, capacity, share=share)
        self._policy = policy
        self._ranked: dict[Node, Ranked] = {}
        self._now_ns = 0

    def use_at(self, path: Path_, prompt: int, now_ns: int) -> None:
        self._now_ns = now_ns
        self.use(path, prompt)

    def _find(self, path: Path_, total: int) -> tuple[list[Node], int]:
        used, at = super()._find(path, total)
        for node in used:
            self._withdraw(self._ranked[node])
        return used, at

    def _insert(self, node: Node, path: Path_, begin: int, total: int, used: list[Node]) -> None:
        if node in self._ranked and node.end == begin < node.limit and not node.children:
            self._policy.left(self._ranked.pop(node), self._now_ns, evicted=False)  # it grows: another content
        super()._insert(node, path, begin, total, used)

    def _used(self, used: list[Node]) -> None:
        for node in used:
            shard = self._ranked.get(node)
            if shard is None:
                shard = self._ranked[node] = Ranked(self._key(node), node)
            shard.uses += 1
            shard.used_ns = self._now_ns
            self._policy.used(shard, ServiceClass.P2, self._now_ns)

    def _offer(self, node: Node) -> None:
        shard = self._ranked[node]
        if not shard.offered:
            shard.offered = True
            self._policy.offer(shard, self._now_ns)

    def _withdraw(self, shard: Ranked) -> None:
        if shard.offered:
            shard.offered = False
            self._policy.withdraw(shard)

    def _evict(self) -> None:
        shard = self._policy.victim(self._now_ns)
        assert isinstance(shard, Ranked), "there is a leaf as long as anything is resident"
        self._policy.left(shard, self._now_ns, evicted=True)
        del self._ranked[shard.node]
        self._remove(shard.node)

    def _key(self, node: Node) -> bytes:
        name = (node.parts[-1][0], node.begin, node.end, None if self._share else self._tick)
        return hashlib.blake2b(repr(name).encode(), digest_size=16).digest()


def least_capacity(hits_at: Callable[[int], int], hits: int, near: int) -> int:
    """Tokens, to within 1 % of ``near``, at which there are as many hits."""
    low, high = near // 8, near
    while high - low > near // 100:
        middle = (low + high) // 2
        if hits_at(middle) >= hits:
            high = middle
        else:
            low = middle
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000, help="the first ones of the trace")
    parser.add_argument("--capacity", type=int, nargs="+", default=[50_000, 200_000], help="tokens of whole sequences")
    parser.add_argument("--policy", default="default", help="what evicts shards")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    jobs = read_trace(options.trace)[: options.requests]
    tree = Conversations(seed=1)
    requests = [(*tree.request(job.input, job.output), job.at_ns) for job in jobs]

    @cache
    def hits(size: int, capacity: int, policy: str, share: bool) -> int:
        tokens = PolicyCache(size, capacity, make_policy(policy), share=share)
        now_ns = 0
        for path, prompt, at_ns in requests:
            now_ns = max(at_ns, now_ns + 1)
            tokens.use_at(path, prompt, now_ns)
        return tokens.hits

    rows: list[dict[str, Any]] = []
    for capacity in options.capacity:
        for policy in dict.fromkeys(("lru", options.policy)):
            for share in (True, False):
                target = hits(WHOLE, capacity, policy, share)
                saved = {}
                for size in SIZES:
                    least = least_capacity(partial(hits, size, policy=options.policy, share=True), target, capacity)
                    saved[str(size)] = round(1 - least / capacity, 3)
                row = {"capacity_tokens": capacity, "whole": "shared" if share else "slabs", "whole_policy": policy}
                rows.append(row | {"hit_tokens": target, "saved": saved})
                print(json.dumps(rows[-1]), flush=True)
    result = report.header(trace=options.trace.name, requests=len(requests), seed=1, policy=options.policy)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result | {"memory": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
