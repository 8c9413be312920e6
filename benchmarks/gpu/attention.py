"""The attention kernels on a GPU: right at odd shapes, the same bits with dependent launch, and how fast.

    python -m benchmarks.gpu.attention --output attention.json [--quick] [--seconds 55]

Decode is timed as it stands in a layer: between the QKV and output products, all launched dependently, minus the same
chain without it. K, V and weights rotate over more than the L2 cache holds. All times are medians of graph replays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.attention_checks import DecodeProblem, Model, PrefillProblem, problems
from firsttoken.kernels.linear.small import Workspace, small_linear
from firsttoken.kernels.paged_attention.gpu_config import BalancedConfig, DecodeConfig, PrefillConfig, decode_config
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace
from firsttoken.kernels.paged_attention.triton_write import write_kv
from firsttoken.kernels.tuning import linear_config

ROOF_TB_S = 4.5
COPY_TB_S = 4.2
_ROTATED_BYTES = 300 << 20
MODELS = {"8b": Model(), "1b": Model(32, 8, 64)}
HIDDEN = {"8b": 4096, "1b": 2048}
SMS = 132


def graph_us(chain: Callable[[], object], count: int, replays: int = 9) -> float:
    """Median microseconds of one of the ``count`` units that ``chain`` launches, in a graph."""
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return float(statistics.median(times[2:]))


def for_each(layers: int, launch: Callable[[int], object]) -> Callable[[], None]:
    def chain() -> None:
        for layer in range(layers):
            launch(layer)

    return chain


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, scale)


# ------------------------------------------------------------------------------------------------ decode


def decode_configs(rows: int, model: Model, quick: bool) -> list[DecodeConfig | BalancedConfig]:
    """The rule's own choice first, then what may beat it."""
    tile = 64 if model.head_dim <= 64 else 32
    own = decode_config(rows, model.kv_heads, model.head_dim, 8192, SMS)
    others: list[DecodeConfig | BalancedConfig]
    if rows * model.kv_heads <= 16:
        others = [
            DecodeConfig(tile, 32, tile),
            DecodeConfig(tile, 16, tile, warps=2),
            DecodeConfig(tile, 16, tile, dot=False, max_registers=200),
            DecodeConfig(2 * tile, 8, 2 * tile),
            BalancedConfig(17, tile, tile, max_registers=None),
            BalancedConfig(33, tile, tile, max_registers=None),
        ]
    else:
        wave = 4 * SMS // model.kv_heads
        others = [BalancedConfig(shares, tile, 2 * tile) for shares in (wave, 2 * wave) if shares > rows]
        others += [BalancedConfig(rows + extra, tile, 2 * tile) for extra in (rows // 2, rows, 2 * rows)]
        others += [
            BalancedConfig(2 * rows, tile, 2 * tile, stages=3),
            BalancedConfig(2 * rows, 2 * tile, 2 * tile, stages=3, max_registers=168),
            DecodeConfig(tile, 1, tile, stages=4, max_registers=128),
            DecodeConfig(tile, 4, 4096, stages=4, max_registers=128),
            DecodeConfig(tile, 4, tile),
        ]
    return list(dict.fromkeys([own, *others]))[: 3 if quick else None]


def contexts(rows: int, context: int) -> tuple[int, ...]:
    """Positions of the new tokens: about ``context``, or for 0 as they lie in the middle of a load of mixed lengths."""
    if context:
        return tuple(context - 1 - row % 3 for row in range(rows))
    lengths = Random(rows)
    return tuple(lengths.choice((64, 256, 512, 2048)) + lengths.randrange(128) for _ in range(rows))


class Chain:
    """Layers of [QKV product] [decode] [output product], with or without the middle one."""

    def __init__(self, name: str, rows: int, context: int) -> None:
        self.model, self.hidden, self.rows = MODELS[name], HIDDEN[name], rows
        spread = contexts(rows, context)
        self.bytes = (sum(spread) + rows) * self.model.kv_heads * self.model.head_dim * 4
        self.layers = max(4, min(16, (12 << 30) // (rows * (max(spread) + 1) * self.bytes // (sum(spread) + rows))))
        self.problem = DecodeProblem(self.model, DecodeConfig(), spread, layers=self.layers, poison=False)
        width = self.model.heads * self.model.head_dim
        copies = max(2, -(-_ROTATED_BYTES // (2 * (self.model.columns + width) * self.hidden)))
        self.qkv_weights = [random(self.model.columns, self.hidden, scale=0.02) for _ in range(copies)]
        self.out_weights = [random(self.hidden, width, scale=0.02) for _ in range(copies)]
        self.h = random(rows, self.hidden)
        self.start = self.h.clone()
        self.workspace = Workspace.allocate(1 << 24, 1 << 14, torch.device("cuda"))

    def product(self, x: Tensor, weight: Tensor, out: Tensor, *, pdl: bool) -> None:
        if self.rows > 16:
            torch.mm(x, weight.T, out=out)
            return
        config = linear_config("plain", *weight.shape, self.rows, torch.cuda.get_device_name())
        small_linear(x, weight, out, config=config, workspace=self.workspace, pdl=pdl)

    def use(self, config: DecodeConfig | BalancedConfig) -> None:
        model = self.model
        self.problem.config = config
        self.problem.workspace = DecodeWorkspace.allocate(
            config.cells(self.rows), self.rows, model.heads, model.kv_heads, model.head_dim, "cuda"
        )

    def run(self, *, pdl: bool = True, attend: bool = True) -> None:
        for layer in range(self.layers):
            copy = layer % len(self.qkv_weights)
            self.product(self.h, self.qkv_weights[copy], self.problem.qkv, pdl=pdl)
            if attend:
                self.problem.launch(layer, pdl=pdl)
            self.product(self.problem.out, self.out_weights[copy], self.h, pdl=pdl)

    def restart(self) -> None:
        self.h.copy_(self.start)


def time_decode(cases: list[tuple[str, int, int]], quick: bool, deadline: float) -> list[dict[str, Any]]:
    results = []
    for name, rows, context in cases:
        if time.monotonic() > deadline:
            print("decode stopped: out of time", flush=True)
            break
        chain = Chain(name, rows, context)
        without = graph_us(partial(chain.run, attend=False), chain.layers)
        gigabytes = 1e-9 * chain.bytes
        timed: list[dict[str, Any]] = []
        for config in decode_configs(rows, chain.model, quick):
            chain.use(config)
            try:
                us = graph_us(chain.run, chain.layers) - without
                alone = graph_us(for_each(chain.layers, chain.problem.launch), chain.layers)
            except Exception as error:  # out of resources: no candidate here
                timed.append({"config": asdict(config), "error": str(error).splitlines()[0][:120]})
                continue
            timed.append({"config": asdict(config), "us": us, "alone_us": alone, "tb_s": gigabytes / alone * 1e3})
        roof = gigabytes / ROOF_TB_S * 1e3
        results.append({"model": name, "rows": rows, "context": context, "roof_us": roof, "configs": timed})
        del chain
        torch.cuda.empty_cache()
    return results


def print_decode(results: list[dict[str, Any]]) -> None:
    print(
        f"\ndecode, us a layer {'':5}{'roof':>7}{'rule':>7}{'best':>7}{'alone':>7}{'TB/s':>6}  best config in the chain"
    )
    for result in results:
        timed = sorted((one for one in result["configs"] if "us" in one), key=lambda one: one["us"])
        if not timed:
            print(result["model"], result["rows"], result["context"], result["configs"][0].get("error"))
            continue
        best, own = timed[0], result["configs"][0].get("us", float("nan"))
        config = " ".join(f"{key}={value}" for key, value in best["config"].items())
        where = f"{result['model']:3} rows {result['rows']:3} at {result['context']:5}"
        figures = f"{result['roof_us']:7.2f}{own:7.2f}{best['us']:7.2f}{best['alone_us']:7.2f}{best['tb_s']:6.2f}"
        print(f"{where:24}{figures}  {config}")


def check_dependent(replays: int) -> dict[str, int]:
    """Replays of a chain with dependent launch whose results differ from those without, by the config."""
    wrong = {}
    configs: dict[int, DecodeConfig | BalancedConfig] = {1: DecodeConfig(splits=8)}
    configs |= {8: DecodeConfig(splits=8, dot=False), 16: BalancedConfig(programs=40)}
    for rows, config in configs.items():
        chain = Chain("8b", rows, 700)
        chain.use(config)
        chain.run(pdl=False)
        torch.cuda.synchronize()
        expected, expected_kv = chain.h.clone(), chain.problem.cache.kv.clone()
        graph = torch.cuda.CUDAGraph()
        chain.restart()
        with torch.cuda.graph(graph):
            chain.restart()
            chain.run(pdl=True)
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(replays):
            graph.replay()
            differ += (chain.h != expected).any()
        bad_cache = not torch.equal(chain.problem.cache.kv, expected_kv)
        wrong[f"{rows} rows {config}"] = int(differ) + bad_cache
        del chain
    return wrong


# --------------------------------------------------------------------------------------------- write_kv


def separate_write(
    qkv: Tensor, kv: Tensor, layer: int, at: tuple[Tensor, Tensor, Tensor], turns: Tensor, heads: int
) -> Tensor:
    """What `write_kv` does, in torch's own operations."""
    tables, slots, positions = at
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    q, k, v = torch.split(qkv.view(len(qkv), -1, head_dim), [heads, kv_heads, kv_heads], 1)
    cos, sin = turns[positions][:, None].unbind(-1)

    def rotate(x: Tensor) -> Tensor:
        even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)

    q, k = rotate(q), rotate(k)
    blocks, places = tables[slots, positions // 16], positions % 16
    kv[blocks, layer, 0, :, places] = k
    kv[blocks, layer, 1, :, places] = v
    return q.flatten(1)


def time_write(rows: int = 2048) -> dict[str, Any]:
    """One request's ``rows`` tokens through the whole position path of an 8B layer, both ways in graphs."""
    model, layers = MODELS["8b"], 12
    problem = PrefillProblem(model, PrefillConfig(), ((0, rows),), layers=layers, poison=False)
    buffers = [random(rows, model.columns) for _ in range(layers)]
    at = (
        problem.cache.tables,
        torch.zeros(rows, dtype=torch.int32, device="cuda"),
        torch.arange(rows, dtype=torch.int32, device="cuda"),
    )
    turning, width = model.turning(rows, "cuda"), model.heads * model.head_dim

    def fused(i: int) -> None:
        write_kv(buffers[i], problem.cache.kv, i, *at, buffers[i][:, :width], **turning)

    def separate(i: int) -> Tensor:
        return separate_write(buffers[i], problem.cache.kv, i, at, turning["cos_sin"], model.heads)

    result: dict[str, Any] = {"rows": rows}
    moved = 2e-12 * rows * model.columns * 2
    for name, one in (("fused", fused), ("separate", separate)):
        one(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one(0)
        extra = torch.cuda.max_memory_allocated() - before
        us = graph_us(for_each(layers, one), layers)
        # Beside the QKV rows, which both need.
        result[name] = {"us": us, "tb_s": moved / us * 1e6, "peak_bytes": buffers[0].nbytes + extra}
    result["speedup"] = result["separate"]["us"] / result["fused"]["us"]
    result["memory_saved"] = 1 - result["fused"]["peak_bytes"] / result["separate"]["peak_bytes"]
    return result


# ---------------------------------------------------------------------------------------------- prefill


def prefill_configs(head_dim: int, quick: bool) -> list[tuple[PrefillConfig, bool]]:
    """Tiles to try, and whether they read K and V from the QKV rows."""
    found = [
        (PrefillConfig(128, 128, 8, 2 if head_dim > 64 else 3), False),
        (PrefillConfig(128, 64, 8, 3), False),
        (PrefillConfig(128, 32 if head_dim > 64 else 64, 4, 3), False),
        (PrefillConfig(128, 128, 8, 2), True),
        (PrefillConfig(128, 64, 8, 3), True),
        (PrefillConfig(64, 64, 4, 3), True),
        (PrefillConfig(128, 128, 8, 3), True),
        (PrefillConfig(128, 128, 8, 2, pack=4), False),
        (PrefillConfig(64, 64, 4, 3), False),
    ]
    return found[:2] if quick else found


def time_prefill(cases: list[tuple[str, int, int]], quick: bool, deadline: float) -> list[dict[str, Any]]:
    """Chunks ``(model, start, tokens)``; a start above 0 is a later chunk of a long prompt."""
    results = []
    for name, start, count in cases:
        if time.monotonic() > deadline:
            print("prefill stopped: out of time", flush=True)
            break
        model = MODELS[name]
        pairs = count * start + count * (count + 1) / 2
        flops = 4.0 * pairs * model.heads * model.head_dim
        layers = 8 if count <= 2048 else 2
        timed: list[dict[str, Any]] = []
        for config, fresh in prefill_configs(model.head_dim, quick):
            problem = PrefillProblem(model, config, ((start, count),), fresh, layers=layers, poison=False)
            entry: dict[str, Any] = {"config": asdict(config), "fresh": fresh}
            try:
                us = graph_us(for_each(layers, problem.launch), layers, 5)
            except Exception as error:  # out of resources: no candidate here
                timed.append(entry | {"error": str(error).splitlines()[0][:120]})
                continue
            timed.append(entry | {"us": us, "tflops": flops / us / 1e6})
        result = {"model": name, "start": start, "tokens": count, "configs": timed}
        results.append(result | ({"torch_us": torch_prefill_us(model, count)} if start == 0 else {}))
        torch.cuda.empty_cache()
    return results


def torch_prefill_us(model: Model, count: int) -> float:
    """cuDNN's causal attention, by torch, over contiguous K and V: no pages."""
    q = random(1, model.heads, count, model.head_dim)
    k, v = (random(1, model.kv_heads, count, model.head_dim) for _ in range(2))

    def attend() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return graph_us(attend, 1, 5)


def print_prefill(results: list[dict[str, Any]]) -> None:
    print(f"\nprefill {'':16}{'torch us':>9}{'us':>9}{'TFLOP/s':>8}  config")
    for result in results:
        where = f"{result['model']:3} {result['tokens']:5} from {result['start']:5}"
        for one in sorted((one for one in result["configs"] if "us" in one), key=lambda one: one["us"])[:4]:
            config = " ".join(f"{key}={value}" for key, value in one["config"].items())
            figures = f"{result.get('torch_us', float('nan')):9.1f}{one['us']:9.1f}{one['tflops']:8.0f}"
            print(f"{where:24}{figures}  {config}{' fresh' if one['fresh'] else ''}")


# ------------------------------------------------------------------------------------- compiling, checking


def compilations(quick: bool) -> Iterator[tuple[str, Any]]:
    """Everything that is run, on the meta device: (what, launcher)."""
    for name, problem in problems(quick, "meta"):
        yield name, problem.launch
    for name, model in MODELS.items():
        for rows in (1, 8, 64):
            for config in decode_configs(rows, model, quick):
                problem = DecodeProblem(model, config, (699,) * rows, "meta", poison=False)
                for pdl in (True, False):
                    yield f"{name} {config} {pdl}", lambda problem=problem, pdl=pdl: problem.launch(pdl=pdl)
        for tiles, fresh in prefill_configs(model.head_dim, quick):
            yield f"{name} {tiles} {fresh}", PrefillProblem(model, tiles, ((0, 64),), fresh, "meta").launch


def compile_part(which: tuple[bool, int, int]) -> list[str]:
    """Compile every ``of``-th kernel in a process of its own; what failed (timing will say why)."""
    quick, part, of = which
    failed = []
    for number, (name, launch) in enumerate(compilations(quick)):
        if number % of == part:
            try:
                launch()
            except Exception as error:
                failed.append(f"{name}: {error!s:.200}")
    return failed


def compile_all(quick: bool) -> None:
    workers = max(1, min(15, len(os.sched_getaffinity(0)) - 1))
    began = time.monotonic()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        failed = [
            one for found in pool.map(compile_part, [(quick, i, workers) for i in range(workers)]) for one in found
        ]
    print(f"compiled in {time.monotonic() - began:.1f} s, {len(failed)} failed", *failed[:10], sep="\n  ", flush=True)


def check(quick: bool) -> dict[str, Any]:
    worst: dict[str, float] = {}
    failures = []
    torch.manual_seed(0)
    for name, problem in problems(quick, "cuda"):
        try:
            found = problem.check()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__} {error!s:.200}")
            continue
        kind = name.split()[0]
        worst[kind] = max(worst.get(kind, 0.0), found)
        if not found <= 1.0:
            failures.append(f"{name}: {found:.2f} times what rounding allows")
    replays = 100 if quick else 1000
    dependent = check_dependent(replays)
    failures += [f"{name}: {bad} of {replays} replays differ" for name, bad in dependent.items() if bad]
    print("errors, 1.0 = rounding:", " ".join(f"{name} {value:.2f};" for name, value in worst.items()))
    print(f"{len(failures)} checks failed", *failures, sep="\n  ", flush=True)
    return {"excess": worst, "failures": failures, "replays": replays, "dependent": dependent}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="a third of the checks, few sizes and configs")
    parser.add_argument("--seconds", type=float, default=55.0, help="start no further timing after this long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    began = time.monotonic()
    compile_all(options.quick)
    checks = check(options.quick)
    print(f"checked after {time.monotonic() - began:.1f} s", flush=True)
    write = time_write()
    fused, separate = write["fused"], write["separate"]
    print(
        f"write_kv {write['rows']} rows: {fused['us']:.1f} us ({fused['tb_s']:.2f} of {COPY_TB_S} TB/s), separate "
        f"torch operations {separate['us']:.1f} us: {write['speedup']:.1f}x, "
        f"{write['memory_saved']:.0%} less peak memory",
        flush=True,
    )
    deadline = began + options.seconds
    prompts = (
        [("8b", 0, 2048)] if options.quick else [("8b", 0, 2048), ("8b", 0, 8192), ("8b", 0, 512), ("8b", 6144, 2048)]
    )
    prefill = time_prefill(prompts if options.quick else [*prompts, ("1b", 0, 8192)], options.quick, deadline)
    print_prefill(prefill)
    # A context of 0: mixed lengths.
    cases = [("8b", 64, 0), ("8b", 64, 576), ("8b", 1, 1024)]
    if not options.quick:
        cases += [("8b", 16, 0), ("8b", 32, 0), ("8b", 128, 0), ("1b", 1, 1024), ("1b", 64, 0), ("8b", 8, 512)]
        cases += [("1b", 8, 1024), ("8b", 1, 8192), ("8b", 16, 8192), ("8b", 64, 8192)]
    decode = time_decode(cases, options.quick, deadline)
    print_decode(decode)
    head = {"command": "gpu.attention", "date": time.strftime("%Y-%m-%dT%H:%M:%S"), "gpu": torch.cuda.get_device_name()}
    versions = {"versions": {"torch": torch.__version__}}
    found = {"checks": checks, "decode": decode, "prefill": prefill, "write_kv": write}
    options.output.write_text(json.dumps(head | versions | found, indent=1))
    print(f"done after {time.monotonic() - began:.1f} s")
    return 1 if checks["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
