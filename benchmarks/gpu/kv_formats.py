"""KV in eight and four bits on a GPU: right at odd shapes, how fast attention is on it, and what an engine gets of it.

    python -m benchmarks.gpu.kv_formats --output DIR [--seconds 240] [--processes 12] [--no-engine]

Checks every attention kernel against float64; times decode attention alone (a CUDA graph over as many layers as hold
more than the L2 cache, medians) in several configs; then runs ``firsttoken bench latency`` for each format.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.attention import for_each, graph_us
from benchmarks.gpu.attention_checks import Model, _ints, excess
from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.kernels.paged_attention import gpu_reference as reference
from firsttoken.kernels.paged_attention.gpu_config import (
    BalancedConfig,
    DecodeConfig,
    PrefillConfig,
    decode_config,
    make_tiles,
    prefill_config,
)
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace, decode
from firsttoken.kernels.paged_attention.triton_prefill import prefill
from firsttoken.kernels.paged_attention.triton_write import write_kv

FORMATS = ("bfloat16", "int8", "fp8", "int4")
ROOF_TB_S = 4.5
SMS = 132
_ROTATED_BYTES = 300 << 20
# Programs of a balanced division that an SM holds.
_RESIDENT = 4
Config = DecodeConfig | BalancedConfig


def pool_of(model: Model, kv_dtype: str, blocks: int, layers: int, device: str) -> Tensor:
    form = KVFormat(dtype=kv_dtype, layers=layers, kv_heads=model.kv_heads, head_dim=model.head_dim)
    return KVPool(form, blocks, device=device).storage


def rounded_of(kv_dtype: str) -> str | None:
    return None if kv_dtype == "bfloat16" else kv_dtype


class Filled:
    """A pool of one layer that holds ``lengths[slot]`` random positions of each slot, and NaN everywhere else."""

    def __init__(self, model: Model, kv_dtype: str, lengths: list[int], room: int, device: str) -> None:
        width = -(-room // 16)
        order = torch.randperm(len(lengths) * width, device="cpu")
        self.tables = order.view(len(lengths), width).int().to(device)
        self.kv = pool_of(model, kv_dtype, order.numel(), 1, device)
        self.kv.fill_(-1 if kv_dtype != "bfloat16" else float("nan"))
        columns = 3 * model.kv_heads * model.head_dim
        for slot, length in enumerate(lengths):
            if length:
                rows = torch.randn(length, columns, device=device)
                at = self.tables, _ints([slot] * length, device), torch.arange(length, device=device).int()
                reference.write_kv(
                    rows, self.kv, 0, *at, num_heads=model.kv_heads, cos_sin=None, rounded=rounded_of(kv_dtype)
                )


def check_decode(model: Model, kv_dtype: str, config: Config, positions: tuple[int, ...], device: str) -> float:
    """Excess over what bfloat16 allows; infinite when a rerun differs or a padding row was touched."""
    rows, slots = len(positions), torch.randperm(len(positions), device="cpu")
    lengths = [0] * rows
    for row, slot in enumerate(slots.tolist()):
        lengths[slot] = max(positions[row], 0)
    cache = Filled(model, kv_dtype, lengths, max(positions) + 1, device)
    at = cache.tables, slots.int().to(device), _ints(positions, device)
    qkv = torch.empty(rows, model.columns, dtype=torch.bfloat16, device=device).normal_()
    out = torch.full((rows, model.heads * model.head_dim), 7.0, dtype=torch.bfloat16, device=device)
    cells = config.cells(rows)
    workspace = DecodeWorkspace.allocate(cells, rows, model.heads, model.kv_heads, model.head_dim, device)
    rounded = {"rounded": rounded_of(kv_dtype)}
    turning, rules = model.turning(max(positions) + 1, device) | rounded, model.rules(device) | rounded
    found = []
    for _ in range(2):
        decode(qkv, cache.kv, 0, *at, out, workspace=workspace, config=config, **(turning | rules))
        found.append(out.clone())
    q, _ = reference.write_kv(qkv, cache.kv.clone(), 0, *at, **turning)
    # Ties of what the kernel rounded fall either way: the reference reads what is there.
    expected = reference.attend(q, cache.kv, 0, *at, **rules)
    real = at[2] >= 0
    if not torch.equal(*found) or not bool((out[~real] == 7.0).all()):
        return float("inf")
    return excess(out[real], expected[real])


def check_prefill(
    model: Model, kv_dtype: str, config: PrefillConfig, chunks: tuple[tuple[int, int], ...], fresh: bool, device: str
) -> float:
    """Write and attend of chunks, with what the write keeps read from the rows (``fresh``) or from the pages."""
    starts, counts = np.array(chunks, np.int32).T
    first = np.cumsum(counts, dtype=np.int32) - counts
    tiles = make_tiles(starts, counts, np.arange(len(chunks), dtype=np.int32), first, config.tile_tokens)
    rows = int(counts.sum())
    slots, positions = (each.to(device) for each in reference.tile_rows(torch.from_numpy(tiles), rows))
    cache = Filled(model, kv_dtype, starts.tolist(), int((starts + counts).max()), device)
    qkv = torch.empty(rows, model.columns, dtype=torch.bfloat16, device=device).normal_()
    q = qkv[:, : model.heads * model.head_dim]
    at = cache.tables, slots, positions
    rounded = {"rounded": rounded_of(kv_dtype)}
    turning = model.turning(int((starts + counts).max()), device) | rounded
    rules = model.rules(device) | rounded
    write_kv(qkv, cache.kv, 0, *at, q, keep_k=fresh, **turning)
    out = torch.full_like(q, 7.0).contiguous()
    prefill(
        q, cache.kv, 0, cache.tables, torch.from_numpy(tiles).to(device), out,
        num_heads=model.heads, config=config, fresh=qkv if fresh else None, **rules,
    )  # fmt: skip
    shaped = q.reshape(rows, model.heads, model.head_dim)
    return excess(out, reference.attend(shaped, cache.kv, 0, *at, **rules))


# What prompts read of rounded KV is scaled to bfloat16: rounding that the unit, which is bfloat16 KV's, does not have.
MOST_OF_PROMPTS = 1.5
_MIXED = (0, 1, 15, 16, 17, -1, 31, 32, 33, 63, 64, 65, 127, 300, -1, 1023, 1024, 2500)
_CHUNKS = ((0, 1), (0, 129), (15, 17), (100, 300), (1000, 128), (2047, 65))


def checks(device: str) -> Iterator[tuple[str, Any]]:
    """(name, what gives its excess)."""
    for kv_dtype in ("int8", "fp8", "int4"):
        for head_dim in (64, 128):
            for heads, kv_heads in ((4, 4), (8, 2), (16, 2)):
                model = Model(heads, kv_heads, head_dim)
                for config in (
                    DecodeConfig(64, 8, 64),
                    DecodeConfig(32, 1, 32),
                    BalancedConfig(40, 64, 128),
                    BalancedConfig(23, 32, 32, max_registers=None),
                ):
                    name = f"decode {kv_dtype} {model} {config}"
                    yield name, lambda m=model, k=kv_dtype, c=config: check_decode(m, k, c, _MIXED, device)
                for fresh in (False, True):
                    name = f"prefill {kv_dtype} {model} fresh={fresh}"
                    yield (
                        name,
                        lambda m=model, k=kv_dtype, f=fresh: check_prefill(
                            m, k, prefill_config(m.head_dim), _CHUNKS, f, device
                        ),
                    )
        for model in (
            Model(8, 2, 128, norm=True, softcap=20.0, window=77),
            Model(12, 12, 64, rope=False, alibi=True),
            Model(8, 1, 256, norm=True),
        ):
            wide = 8 if model.head_dim > 128 else 4
            config = DecodeConfig(32, 8, 32, warps=wide)
            name = f"decode {kv_dtype} {model}"
            yield name, lambda m=model, k=kv_dtype, c=config: check_decode(m, k, c, _MIXED, device)
            name = f"prefill {kv_dtype} {model}"
            yield (
                name,
                lambda m=model, k=kv_dtype: check_prefill(m, k, prefill_config(m.head_dim), _CHUNKS, True, device),
            )


def some_checks(device: str, first: int, step: int) -> tuple[dict[str, float], list[str]]:
    """Every ``step``-th check from ``first`` on: the worst excess of each kind, and what failed."""
    worst: dict[str, float] = {}
    failures = []
    torch.manual_seed(first)
    for name, check in islice(checks(device), first, None, step):
        kind = " ".join(name.split()[:2])
        try:
            found = check()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__} {error!s:.300}")
            continue
        worst[kind] = max(worst.get(kind, 0.0), found)
        if not found <= (MOST_OF_PROMPTS if name.startswith("prefill") else 1.0):
            failures.append(f"{name}: {found:.2f} times what rounding allows")
    return worst, failures


def run_checks(device: str, processes: int) -> dict[str, Any]:
    """All of them, in processes side by side: most of their time is Triton's compiler."""
    worst: dict[str, float] = {}
    failures: list[str] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for excess, failed in pool.map(partial(some_checks, device, step=processes), range(processes)):
            failures += failed
            for kind, found in excess.items():
                worst[kind] = max(worst.get(kind, 0.0), found)
    print("errors, 1.0 = rounding:", " ".join(f"{name} {value:.2f};" for name, value in worst.items()))
    print(f"{len(failures)} checks failed", *failures, sep="\n  ", flush=True)
    return {"excess": worst, "failures": failures}


# ------------------------------------------------------------------------------------------------ timing


def configs(rows: int, model: Model, kv_dtype: str) -> list[Config]:
    """The rule's own first, then larger tiles and more of them in flight."""
    own = decode_config(rows, model.kv_heads, model.head_dim, 8192, SMS, kv_dtype != "bfloat16")
    if kv_dtype == "bfloat16":
        return [own]
    found: list[Config] = [own]
    for tile, stages, warps in ((32, 3, 4), (64, 4, 4), (128, 3, 4), (64, 3, 2)):
        if isinstance(own, DecodeConfig):
            found.append(DecodeConfig(tile, own.splits, tile, warps=warps, stages=stages))
        else:
            found.append(BalancedConfig(own.programs, tile, 2 * tile, warps=warps, stages=stages))
    if isinstance(own, BalancedConfig):
        found.append(BalancedConfig(own.programs, 64, 128, stages=3, max_registers=None))
        # As many as fit beside each other at once: no second wave.
        found.append(BalancedConfig(max(rows + 1, _RESIDENT * SMS // model.kv_heads), 64, 128, stages=3))
    return list(dict.fromkeys(found))


def time_decode(rows: int, context: int, kv_dtype: str, model: Model) -> dict[str, Any]:
    form = KVFormat(dtype=kv_dtype, layers=1, kv_heads=model.kv_heads, head_dim=model.head_dim)
    a_layer = rows * context * form.bytes_per_token
    layers = max(2, min(32, -(-_ROTATED_BYTES // a_layer)))
    width = -(-(context + 1) // 16)
    kv = pool_of(model, kv_dtype, rows * width, layers, "cuda")
    if kv_dtype == "bfloat16":
        kv.normal_()
    else:
        kv.random_(0, 1 << 14).bitwise_and_(0x3F3F)  # finite elements and scales
    tables = torch.randperm(rows * width, device="cpu").view(rows, width).int().cuda()
    at = tables, torch.arange(rows, device="cuda").int(), _ints([context - row % 3 for row in range(rows)], "cuda")
    qkv = torch.empty(rows, model.columns, dtype=torch.bfloat16, device="cuda").normal_()
    out = torch.empty(rows, model.heads * model.head_dim, dtype=torch.bfloat16, device="cuda")
    rounded = {"rounded": rounded_of(kv_dtype)}
    options = model.turning(context + 1, "cuda") | model.rules("cuda") | rounded
    timed: list[dict[str, Any]] = []
    for config in configs(rows, model, kv_dtype):
        workspace = DecodeWorkspace.allocate(
            config.cells(rows), rows, model.heads, model.kv_heads, model.head_dim, "cuda"
        )

        def launch(layer: int, config: Config = config, workspace: DecodeWorkspace = workspace) -> None:
            decode(
                qkv, kv, layer, *at, out, workspace=workspace, config=config, pdl=True, early_rows=True, **options
            )  # fmt: skip

        try:
            us = graph_us(for_each(layers, launch), layers)
        except Exception as error:  # out of resources: no candidate here
            timed.append({"config": repr(config), "error": str(error).splitlines()[0][:160]})
            continue
        timed.append({"config": repr(config), "us": us, "tb_s": a_layer / us / 1e6})
    good = [one for one in timed if "us" in one]
    best = min(good, key=lambda one: one["us"]) if good else {"us": float("nan"), "tb_s": float("nan"), "config": ""}
    own_us = timed[0].get("us", float("nan"))
    print(
        f"{kv_dtype:9} rows {rows:3} at {context:5}: rule {own_us:7.2f} us, best {best['us']:7.2f} "
        f"({best['tb_s']:.2f} TB/s, roof {a_layer / ROOF_TB_S / 1e6:.2f} us) {best['config']}",
        flush=True,
    )
    return {"kv_dtype": kv_dtype, "rows": rows, "context": context, "model": asdict(model), "configs": timed}


def time_write(kv_dtype: str, model: Model, rows: int = 2048) -> dict[str, Any]:
    """One layer's position pass and prefill attention of one prompt."""
    width = rows // 16
    kv = pool_of(model, kv_dtype, width, 4, "cuda")
    kv.zero_()
    tables = torch.randperm(width, device="cpu").view(1, width).int().cuda()
    at = tables, torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.arange(rows, device="cuda").int()
    buffers = [torch.empty(rows, model.columns, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(4)]
    rounded, wide = {"rounded": rounded_of(kv_dtype)}, model.heads * model.head_dim
    turning, rules = model.turning(rows, "cuda") | rounded, model.rules("cuda") | rounded
    tiling = prefill_config(model.head_dim)
    one = np.array([0], np.int32)
    tiles = torch.from_numpy(make_tiles(one, one + rows, one, one, tiling.tile_tokens)).cuda()
    half = torch.from_numpy(make_tiles(one + rows // 2, one + rows // 2, one, one, tiling.tile_tokens)).cuda()
    out = torch.empty(rows, wide, dtype=torch.bfloat16, device="cuda")

    def write(layer: int) -> None:
        q = buffers[layer][:, :wide]
        write_kv(buffers[layer], kv, layer, *at, q, keep_k=True, **turning)

    def attend(layer: int, cut: Tensor = tiles) -> None:
        own = buffers[layer]
        prefill(own[:, :wide], kv, layer, tables, cut, out, num_heads=model.heads, config=tiling, fresh=own, **rules)

    found = {
        "kv_dtype": kv_dtype,
        "rows": rows,
        "write_us": graph_us(for_each(4, write), 4),
        "prefill_us": graph_us(for_each(4, attend), 4),
        "second_half_us": graph_us(for_each(4, lambda layer: attend(layer, half)), 4),
    }
    print(" ".join(f"{key} {value:.1f}" if isinstance(value, float) else str(value) for key, value in found.items()))
    return found


def run_engine(kv_dtype: str, batch: int, prompt: int, output: int, folder: Path) -> dict[str, Any]:
    """``firsttoken bench latency`` of an 8B, as a caller would."""
    command = [
        sys.executable, "-m", "firsttoken.cli.main",
        "bench", "latency", "random:llama-3.1-8b", "--batch", str(batch), "--input", str(prompt), "--output",
        str(output), "--repeat", "3", "--kv-dtype", kv_dtype, "--max-model-len", str(prompt + output + 64),
        "--kv-memory", "24GiB", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    path = folder / f"latency_{kv_dtype}_b{batch}_{prompt}.json"
    path.write_text(done.stdout or done.stderr[-4000:])
    if done.returncode:
        print(f"bench latency {kv_dtype} failed ({done.returncode}): {done.stderr[-600:]}", flush=True)
        return {"kv_dtype": kv_dtype, "error": done.stderr[-600:]}
    told = json.loads(done.stdout)
    form = KVFormat(dtype=kv_dtype, layers=32, kv_heads=8, head_dim=128)
    print(
        f"8B {kv_dtype:9} {batch} x ({prompt} + {output}): TTFT {told['ttft_ms']['p50']:.1f} ms, ITL "
        f"{told['itl_ms']['p50']:.2f} ms, {told['tokens_per_s_median']:.0f} tokens/s; {form.bytes_per_token} B a token",
        flush=True,
    )
    return {"kv_dtype": kv_dtype, "batch": batch, "input": prompt, "output": output, "result": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no further timing after this long")
    parser.add_argument("--processes", type=int, default=12, help="that check side by side")
    parser.add_argument("--no-engine", action="store_true", help="leave bench latency out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["checks"] = run_checks("cuda", options.processes)
    print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
    model = Model()
    found["write"] = [time_write(kv_dtype, model) for kv_dtype in FORMATS]
    found["decode"] = []
    for rows, context in ((64, 1024), (1, 1024), (64, 8192), (1, 8192), (8, 1024), (8, 8192)):
        for kv_dtype in FORMATS:
            if time.monotonic() - began < options.seconds:
                found["decode"].append(time_decode(rows, context, kv_dtype, model))
                torch.cuda.empty_cache()
    (options.output / "kv_formats.json").write_text(json.dumps(found, indent=1))
    if not options.no_engine:
        found["engine"] = [
            run_engine(kv_dtype, batch, prompt, 128, options.output)
            for batch, prompt in ((64, 512), (32, 4096))
            for kv_dtype in FORMATS
        ]
        (options.output / "kv_formats.json").write_text(json.dumps(found, indent=1))
    print(f"done after {time.monotonic() - began:.0f} s")
    return 1 if found["checks"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
