"""Run by test_ahead in a process of its own, where Triton compiles: ``same``, ``hash``, ``compile`` or ``sleep``."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence

import msgspec
import torch
from triton import knobs

from firsttoken.core.kv_format import KVFormat
from firsttoken.executor.ahead.outline import outline
from firsttoken.executor.ahead.plan import Key, all_keys
from firsttoken.executor.ahead.target import compile_for
from firsttoken.executor.ahead.workers import Workers
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.executor.graphs.load import limits
from firsttoken.executor.graphs.profiles import ShapeTable
from firsttoken.executor.graphs.runtime import HostRuntime
from firsttoken.kernels.launch import settle_hash
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.kernels.sample import triton, triton_edits, triton_search
from firsttoken.kernels.step_io import begin_step, end_step, new_state, start_rows
from firsttoken.models.load_fused import load_fused
from tests.executor.test_ahead import make_order
from tests.executor.test_graph_executor import make_weights


def asked_for(executor: GraphExecutor, keys: Sequence[Key]) -> set[tuple[str, str, str]]:
    """The names of all kernels that steps of these keys launch, none of which is compiled or run."""
    found: set[tuple[str, str, str]] = set()

    def note(*, key, fn, **_):
        found.add((fn.module, fn.name, key))
        return True

    knobs.runtime.jit_cache_hook = note
    for key in keys:
        executor.rehearse(key)
    return found


def same() -> None:
    """An executor with weights and memory against its outline."""
    checkpoint = make_weights("LlamaForCausalLM")
    order = make_order()
    kv = KVFormat(dtype="bfloat16", layers=2, kv_heads=checkpoint.config.num_kv_heads, head_dim=16)
    order = msgspec.structs.replace(
        order, model=checkpoint.config, executor=dataclasses.replace(order.executor, kv_format=kv)
    )
    config = order.executor
    chosen = limits(config, order.gpu.name, order.gpu.sms)
    with torch.inference_mode():
        model = load_fused(checkpoint, KVPool(kv, config.kv_blocks), torch.device("cpu"), chosen)
    executor, sketch = GraphExecutor(config, model, HostRuntime()), outline(order)
    real = asked_for(executor, all_keys(executor.table))
    ahead = asked_for(sketch, all_keys(sketch.table))
    assert len(real) > 20
    assert real == ahead, f"missed {real - ahead}, needless {ahead - real}"
    first = asked_for(sketch, all_keys(sketch.table)[:1])
    assert "start_kernel" in {name for _, name, _ in first}, "a start waits for the first key's kernels"
    print("the same")


def hash_in_turn() -> None:
    """All functions of the sampling kernels' modules, each hashed first once."""
    modules = (triton, triton_search, triton_edits)
    functions = {id(f): f for module in modules for f in vars(module).values() if hasattr(type(f), "cache_key")}
    found: dict[int, set[str]] = {number: set() for number in functions}
    for first in functions.values():
        for function in functions.values():
            function.hash = None
            function.used_global_vals = {}
        settle_hash(first)
        for number, function in functions.items():
            if function.hash is None:
                settle_hash(function)
            found[number].add(function.hash)
    assert len(functions) > 10
    assert all(len(hashes) == 1 for hashes in found.values())
    print("one hash each")


class Few:
    """What starts rows, and a step's first kernel and its last, which the interpreter does not run as they are."""

    def rehearse(self, key: Key) -> None:
        words = torch.empty(64, dtype=torch.int32, device="meta")
        ring = torch.empty((2, 64), dtype=torch.int32)
        state = new_state(torch.device("meta"))
        rows = words.view(4, 16)
        start_rows(rows, rows, rows, ring[0], 3, 2, 5000)
        begin_step(words, ring, state, words[32:35].view(1, 3), rows)
        end_step(words, ring, torch.empty((2, 2), dtype=torch.int64), state, pdl=True)


class Sleeper:
    def rehearse(self, key: Key) -> None:
        time.sleep(100)


def main(what: str) -> None:
    compile_for(90)
    if what in ("same", "hash"):
        same() if what == "same" else hash_in_turn()
        return
    key = all_keys(ShapeTable(4, 64, 64))[0]
    workers = Workers(Sleeper() if what == "sleep" else Few(), [key, key], 2, 1)
    if what == "sleep":
        print(*workers._pids, flush=True)
        time.sleep(100)
    with os.fdopen(workers.reports) as reports:
        print(reports.read())
    workers.stop()


main(sys.argv[1])
