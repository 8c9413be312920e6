"""Problems for the attention kernels on a GPU, and their answers in float64.

Every part of the KV pool that a row may not see is NaN, so that reading too much shows. Problems can be built on the
"meta" device, where launching one compiles its kernel and does no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firsttoken.kernels.paged_attention import gpu_reference as reference
from firsttoken.kernels.paged_attention.gpu_config import (
    TILE_WORDS,
    BalancedConfig,
    DecodeConfig,
    PrefillConfig,
    make_tiles,
    prefill_config,
)
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace, decode
from firsttoken.kernels.paged_attention.triton_prefill import prefill
from firsttoken.kernels.paged_attention.triton_write import write_kv

# The width of a bf16 rounding step around a value, and how many of them a result may be off: q, K, V and the softmax
# weights are rounded once each before the result is. Scores of random heads lie around 30, where the rounding of q
# moves a weight by 2 %; of some millions of results the worst was 7 steps off.
_STEP = 2.0**-8
_STEPS = 8.0


@dataclass(frozen=True)
class Model:
    """The sizes and options of one layer's attention."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    norm: bool = False
    rope: bool = True
    alibi: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def rules(self, device: str) -> dict[str, Any]:
        slopes = torch.logspace(-1, -8, self.heads, base=2.0, device=device) if self.alibi else None
        return {"scale": self.head_dim**-0.5, "slopes": slopes, "window": self.window, "softcap": self.softcap}

    def turning(self, positions: int, device: str) -> dict[str, Any]:
        turns = None
        if self.rope:
            angles = torch.outer(
                torch.arange(positions, device=device).float(),
                torch.logspace(0, -4, self.head_dim // 2, base=10.0, device=device),
            )
            turns = torch.stack((angles.cos(), angles.sin()), -1).contiguous()
        norm = None
        if self.norm:
            norm = *(torch.rand(self.head_dim, device=device) + 0.5 for _ in range(2)), 1e-5
        return {"num_heads": self.heads, "cos_sin": turns, "qk_norm": norm}


@dataclass
class Cache:
    """A pool of one layer or more in which slot ``s`` has ``lengths[s]`` positions; the rest may be NaN."""

    kv: Tensor
    tables: Tensor

    @classmethod
    def build(
        cls, model: Model, lengths: Sequence[int], room: int, device: str, *, layers: int = 1, poison: bool = True
    ) -> Cache:
        width = -(-room // 16)
        blocks = len(lengths) * width
        order = torch.randperm(blocks, device="cpu").to(device)
        shape = (blocks, layers, 2, model.kv_heads, 16, model.head_dim)
        kv = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        if poison:
            at = torch.arange(width * 16, device=device).view(width, 16)
            unseen = torch.zeros(blocks, 16, dtype=torch.bool, device=device)
            held = torch.tensor(list(lengths), device=device).view(-1, 1, 1)
            unseen[order] = (at >= held).view(blocks, 16)
            kv.masked_fill_(unseen[:, None, None, None, :, None], float("nan"))
        return cls(kv, order.view(len(lengths), width).int())


def _ints(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def excess(found: Tensor, expected: Tensor) -> float:
    """The largest error in units of what bf16 allows; NaN counts as infinite."""
    if not found.numel():
        return 0.0
    error = (found.double() - expected).abs() / (expected.abs().clamp(min=0.25) * _STEP * _STEPS)
    return float(error.nan_to_num(nan=float("inf")).max())


def cache_excess(found: Tensor, expected: Tensor) -> float:
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    return excess(found.nan_to_num(), expected.nan_to_num().double())


@dataclass
class DecodeProblem:
    """One decode step; ``positions`` may hold -1."""

    model: Model
    config: DecodeConfig | BalancedConfig
    positions: tuple[int, ...]
    device: str = "cuda"
    layers: int = 1
    poison: bool = True
    early_rows: bool = True
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        model, rows, device = self.model, len(self.positions), self.device
        slots = torch.randperm(rows, device="cpu")
        lengths = [0] * rows
        for row, slot in enumerate(slots.tolist()):
            lengths[slot] = max(self.positions[row], 0)
        room = max(self.positions) + 1
        self.cache = Cache.build(model, lengths, room, device, layers=self.layers, poison=self.poison)
        self.at = (self.cache.tables, slots.int().to(device), _ints(self.positions, device))
        self.qkv = torch.empty(rows, model.columns, dtype=torch.bfloat16, device=device).normal_()
        self.out = torch.empty(rows, model.heads * model.head_dim, dtype=torch.bfloat16, device=device).fill_(7.0)
        self.turning, self.rules = model.turning(room, device), model.rules(device)
        self.workspace = DecodeWorkspace.allocate(
            self.config.cells(rows), rows, model.heads, model.kv_heads, model.head_dim, torch.device(device)
        )

    def launch(self, layer: int = 0, *, pdl: bool = False) -> None:
        tables, slots, positions = self.at
        decode(
            self.qkv,
            self.cache.kv,
            layer,
            tables,
            slots,
            positions,
            self.out,
            workspace=self.workspace,
            config=self.config,
            pdl=pdl,
            early_rows=self.early_rows,
            **self.turning,
            **self.rules,
        )

    def check(self) -> float:
        """Excess of results and cache; infinite when a padding row was touched or a rerun gives other bits."""
        expected_kv = self.cache.kv.clone()
        self.launch()
        q, _ = reference.write_kv(self.qkv, expected_kv, 0, *self.at, **self.turning)
        expected = reference.attend(q, expected_kv, 0, *self.at, **self.rules)
        real = self.at[2] >= 0
        first = self.out.clone()
        self.launch()
        if not torch.equal(first, self.out) or not bool((self.out[~real] == 7.0).all()):
            return float("inf")
        return max(excess(self.out[real], expected[real]), cache_excess(self.cache.kv, expected_kv))


@dataclass
class WriteProblem:
    """``write_kv`` of ``rows`` rows, every seventh of them padding."""

    model: Model
    rows: int
    device: str = "cuda"

    def __post_init__(self) -> None:
        rows, model, device = self.rows, self.model, self.device
        positions = [-1 if row % 7 == 6 else row * 5 % 40 for row in range(rows)]
        self.cache = Cache.build(model, [0] * rows, 40, device)
        self.at = (self.cache.tables, torch.randperm(rows, device="cpu").int().to(device), _ints(positions, device))
        self.qkv = torch.empty(rows, model.columns, dtype=torch.bfloat16, device=device).normal_()
        self.turning = model.turning(40, device)

    def launch(self, *, pdl: bool = False) -> None:
        q = self.qkv[:, : self.model.heads * self.model.head_dim]
        write_kv(self.qkv, self.cache.kv, 0, *self.at, q, pdl=pdl, **self.turning)

    def check(self) -> float:
        before, expected_kv = self.qkv.clone(), self.cache.kv.clone()
        self.launch()
        q, _ = reference.write_kv(before, expected_kv, 0, *self.at, **self.turning)
        before[self.at[2] >= 0, : q.shape[1] * q.shape[2]] = q.flatten(1).bfloat16()[self.at[2] >= 0]
        return max(excess(self.qkv, before.double()), cache_excess(self.cache.kv, expected_kv))


@dataclass
class PrefillProblem:
    """Chunks ``(start, count)``, one a slot, with a row before each that belongs to no tile."""

    model: Model
    config: PrefillConfig
    chunks: tuple[tuple[int, int], ...]
    fresh: bool = False
    device: str = "cuda"
    layers: int = 1
    poison: bool = True

    def __post_init__(self) -> None:
        model, device = self.model, self.device
        starts, counts = np.array(self.chunks, np.int32).T
        first = np.cumsum(counts + 1, dtype=np.int32) - counts
        slots = np.arange(len(counts), dtype=np.int32)
        tiles = make_tiles(starts, counts, slots, first, self.config.tile_tokens)
        self.host_tiles = np.concatenate((tiles, np.zeros((1, TILE_WORDS), np.int32)))
        self.tiles = torch.from_numpy(self.host_tiles).to(device)
        self.rows = int(first[-1] + counts[-1])
        ends = (starts + counts).tolist()
        self.cache = Cache.build(model, ends, max(ends), device, layers=self.layers, poison=self.poison)
        self.qkv = torch.empty(self.rows, model.columns, dtype=torch.bfloat16, device=device).normal_()
        self.q = self.qkv[:, : model.heads * model.head_dim]
        self.out = torch.empty(self.q.shape, dtype=torch.bfloat16, device=device).fill_(7.0)
        self.rules = model.rules(device)

    def launch(self, layer: int = 0, *, pdl: bool = False) -> None:
        prefill(
            self.q,
            self.cache.kv,
            layer,
            self.cache.tables,
            self.tiles,
            self.out,
            num_heads=self.model.heads,
            config=self.config,
            fresh=self.qkv if self.fresh else None,
            pdl=pdl,
            **self.rules,
        )

    def check(self) -> float:
        slots, positions = reference.tile_rows(torch.from_numpy(self.host_tiles), self.rows)
        slots, positions = slots.to(self.device), positions.to(self.device)
        if self.fresh:
            elsewhere = torch.empty_like(self.out)
            at = (self.cache.tables, slots, positions)
            write_kv(self.qkv, self.cache.kv, 0, *at, elsewhere, num_heads=self.model.heads, cos_sin=None, keep_k=True)
        self.launch()
        shaped = self.q.reshape(self.rows, self.model.heads, self.model.head_dim)
        expected = reference.attend(shaped, self.cache.kv, 0, self.cache.tables, slots, positions, **self.rules)
        real = positions >= 0
        first = self.out.clone()
        self.launch()
        if not torch.equal(first, self.out) or not bool((self.out[~real] == 7.0).all()):
            return float("inf")
        return excess(self.out[real], expected[real])


Problem = DecodeProblem | WriteProblem | PrefillProblem
_GROUPS = ((4, 4), (6, 2), (8, 2), (16, 2))  # 1, 3, 4 and 8 query heads a KV head
_MIXED = (0, 1, 15, 16, 17, -1, 31, 32, 33, 63, 64, 65, 127, 300, -1, 1023, 1024, 2500)
_LONG = (8191, 131, 0)
_CHUNKS = ((0, 1), (0, 129), (15, 17), (100, 300), (1000, 128), (2047, 65))


def problems(quick: bool, device: str) -> Iterator[tuple[str, Problem]]:
    """Odd shapes for each kernel and option, named; ``quick`` leaves two in three out."""
    everything = (*_decode_problems(device), *_write_problems(device), *_prefill_problems(device))
    for number, (name, make) in enumerate(everything):
        if not quick or number % 3 == 0:
            yield name, make()


def _decode_problems(device: str) -> Iterator[tuple[str, Any]]:
    def case(
        model: Model, config: DecodeConfig | BalancedConfig, positions: tuple[int, ...] = _MIXED, early: bool = True
    ) -> Any:
        return f"decode {model} {config}", lambda: DecodeProblem(model, config, positions, device, early_rows=early)

    def config(number: int, warps: int = 4) -> DecodeConfig | BalancedConfig:
        dot = number % 4 < 2
        if number % 2:
            return BalancedConfig(20 + number, warps=warps, dot=dot, max_registers=None)
        return DecodeConfig(splits=8, warps=warps, dot=dot)

    number = 0
    for head_dim in (64, 80, 128):
        for heads, kv_heads in _GROUPS:
            for _ in range(2):
                yield case(Model(heads, kv_heads, head_dim), config(number), early=number % 3 > 0)
                number += 1
            number += 1
    yield case(Model(8, 1, 256), DecodeConfig(splits=16, warps=8))
    yield case(Model(), DecodeConfig(splits=32, max_registers=200), _LONG)
    yield case(Model(), DecodeConfig(splits=2, min_split=1024, max_registers=128), _LONG)
    yield case(Model(2, 2, 64), DecodeConfig(splits=2, block_tokens=16, min_split=16))
    yield case(Model(8, 1, 256), BalancedConfig(programs=40, warps=8, max_registers=None))
    yield case(Model(), BalancedConfig(programs=66), _LONG)
    yield case(Model(), BalancedConfig(programs=160), _MIXED * 8)
    yield case(Model(), DecodeConfig(splits=1, stages=4, max_registers=128), _MIXED * 4)
    for number, model in enumerate(
        (
            Model(8, 2, 96, norm=True),
            Model(8, 4, 256, window=100, softcap=50.0),
            Model(8, 2, 128, window=1),
            Model(8, 2, 128, window=1000),
            Model(12, 12, 64, rope=False, alibi=True),
            Model(8, 2, 64, norm=True, alibi=True, softcap=20.0, window=77),
        )
    ):
        yield case(model, config(number, warps=8 if model.head_dim > 128 else 4))


def _write_problems(device: str) -> Iterator[tuple[str, Any]]:
    for number, rows in enumerate((1, 3, 17, 300)):
        heads, kv_heads = _GROUPS[number]
        for head_dim in (64, 80, 128):
            model = Model(heads, kv_heads, head_dim, norm=(number + head_dim // 16) % 2 == 0)
            yield f"write_kv {rows} {model}", lambda model=model, rows=rows: WriteProblem(model, rows, device)


def _prefill_problems(device: str) -> Iterator[tuple[str, Any]]:
    def case(model: Model, config: PrefillConfig, chunks: Any = _CHUNKS, fresh: bool = False) -> Any:
        return (
            f"prefill {model} {config}{' fresh' if fresh else ''}",
            lambda: PrefillProblem(model, config, chunks, fresh, device),
        )

    for head_dim in (64, 80, 128):
        for number, (heads, kv_heads) in enumerate(_GROUPS):
            block_n = (128, 64, 32, 128)[number]
            yield case(Model(heads, kv_heads, head_dim), PrefillConfig(block_n=block_n, stages=2 + (block_n < 128)))
    yield case(Model(), PrefillConfig(pack=4))
    yield case(Model(8, 2), PrefillConfig(block_n=32, warps=4, stages=3))
    yield case(Model(8, 2), PrefillConfig(block_m=64, block_n=64, warps=4, stages=3, pack=2))
    yield case(Model(8, 2), PrefillConfig(), ((0, 1), (0, 700), (0, 129)), fresh=True)
    yield case(Model(), PrefillConfig(64, 64, 4, 3), fresh=True)
    yield case(Model(8, 2, 64), PrefillConfig(block_n=64, stages=3), ((0, 300), (0, 128)), fresh=True)
    yield case(Model(8, 4, 256, window=150, softcap=50.0), prefill_config(256))
    yield case(Model(8, 2, window=1), PrefillConfig())
    yield case(Model(8, 2, window=1000), PrefillConfig(block_n=64, stages=3))
    yield case(Model(12, 12, 64, alibi=True), PrefillConfig())
    yield case(Model(8, 2, 96, alibi=True, softcap=20.0, window=333), PrefillConfig(block_n=64))
