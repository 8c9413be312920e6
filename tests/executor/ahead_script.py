"""Run by test_ahead in a process of its own, where Triton compiles: ``same``, ``hash``, ``compile`` or ``sleep``."""

from __future__ import annotations

import dataclasses
import os
import sys
import time

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
from firsttoken.kernels.step_io import begin_step, end_step, new_state
from firsttoken.models.load_fused import load_fused
from tests.executor.test_ahead import make_order
from tests.executor.test_graph_executor import make_weights


def asked_for(executor: GraphExecutor) -> set[tuple[str, str, str]]:
    """The names of all kernels that steps launch, none of which is compiled or run."""
    found: set[tuple[str, str, str]] = set()

    def note(*, key, fn, **_):
        found.add((fn.module, fn.name, key))
        return True

    knobs.runtime.jit_cache_hook = note
    for key in all_keys(executor.table):
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
    real = asked_for(GraphExecutor(config, model, HostRuntime()))
    ahead = asked_for(outline(order))
    assert len(real) > 20
    assert real == ahead, f"missed {real - ahead}, needless {ahead - real}"
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


class Two:
    """A step's first kernel and its last, which the interpreter does not run as they are."""

    def rehearse(self, key: Key) -> None:
        words = torch.empty(64, dtype=torch.int32, device="meta")
        ring = torch.empty((2, 64), dtype=torch.int32)
        state = new_state(torch.device("meta"))
        begin_step(words, ring, state, words[32:35].view(1, 3), words.view(4, 16))
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
    workers = Workers(Sleeper() if what == "sleep" else Two(), [key, key], 2, 1)
    if what == "sleep":
        print(*workers._pids, flush=True)
        time.sleep(100)
    with os.fdopen(workers.reports) as reports:
        print(reports.read())
    workers.stop()


main(sys.argv[1])
