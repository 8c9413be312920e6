"""The GPU attention kernels against their float64 reference: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from firsttoken.kernels.paged_attention import gpu_reference as reference
from firsttoken.kernels.paged_attention.gpu_config import (
    TILE_WORDS,
    BalancedConfig,
    DecodeConfig,
    PrefillConfig,
    decode_config,
    make_tiles,
    make_tiles_of_one,
    prefill_config,
)
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace, decode
from firsttoken.kernels.paged_attention.triton_prefill import prefill
from firsttoken.kernels.paged_attention.triton_write import write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER = 2, 1
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
NAN = float("nan")


@dataclass(frozen=True)
class Cache:
    """A pool in which only the first ``lengths[slot]`` positions of each slot hold numbers; all else is NaN."""

    kv: Tensor
    tables: Tensor

    def copy(self) -> Cache:
        return Cache(self.kv.clone(), self.tables)


def make_cache(
    lengths: list[int], room: int, kv_heads: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Cache:
    """``room`` tokens a slot on shuffled blocks."""
    width = -(-room // 16)
    order = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    kv = torch.full((order.numel(), LAYERS, 2, kv_heads, 16, head_dim), NAN)
    for slot, length in enumerate(lengths):
        for position in range(length):
            shape = (2, kv_heads, head_dim)
            kv[order[slot, position // 16], LAYER, :, :, position % 16] = torch.randn(shape, generator=generator)
    return Cache(kv.to(dtype).to(DEVICE), order.int().to(DEVICE))


def make_turns(positions: int, head_dim: int) -> Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10.0 ** -torch.linspace(0, 2, head_dim // 2))
    return torch.stack((angles.cos(), angles.sin()), -1).to(DEVICE)


def make_norm(head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    q, k = (torch.rand(2, head_dim, generator=generator) + 0.5).to(DEVICE)
    return q, k, 1e-5


def same_cache(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool(
        torch.equal(a.isnan(), b.isnan()) and (a.nan_to_num().double() - b.nan_to_num()).abs().max() < tolerance
    )


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# ------------------------------------------------------------------------------------------------ decode


def check_decode(
    positions: list[int],
    config: DecodeConfig | BalancedConfig,
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    rope: bool = True,
    norm: bool = False,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """One decode step against the reference: the result, what is written, and that the workspace is at rest after."""
    generator = torch.Generator().manual_seed(seed)
    rows, heads = len(positions), kv_heads * group
    slots = torch.randperm(rows, generator=generator).int()
    lengths = [0] * rows
    for row, position in enumerate(positions):
        lengths[int(slots[row])] = max(position, 0)
    cache = make_cache(lengths, max(positions) + 1, kv_heads, head_dim, dtype, generator)
    expected_cache = cache.copy()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype).to(DEVICE)
    qkv[[row for row, position in enumerate(positions) if position < 0]] = NAN
    turns = make_turns(max(positions) + 1, head_dim) if rope else None
    qk_norm = make_norm(head_dim, generator) if norm else None
    at = (cache.tables, slots.to(DEVICE), ints(positions))
    out = torch.full((rows, heads * head_dim), 7.0, dtype=dtype, device=DEVICE)
    workspace = DecodeWorkspace.allocate(config.cells(rows), rows, heads, kv_heads, head_dim, DEVICE)
    scale = head_dim**-0.5
    decode(
        qkv, cache.kv, LAYER, *at, out,
        num_heads=heads, scale=scale, cos_sin=turns, workspace=workspace, config=config, qk_norm=qk_norm, **options,
    )  # fmt: skip
    q, _ = reference.write_kv(qkv, expected_cache.kv, LAYER, *at, num_heads=heads, cos_sin=turns, qk_norm=qk_norm)
    expected = reference.attend(q, expected_cache.kv, LAYER, *at, scale=scale, **options)
    real = at[2] >= 0
    assert (out[real].double() - expected[real]).abs().max() < TOLERANCE[dtype]
    assert bool((out[~real] == 7.0).all())
    assert same_cache(cache.kv, expected_cache.kv, TOLERANCE[dtype])
    assert bool((workspace.arrived == 0).all())
    return out


@pytest.mark.parametrize("dot", [True, False])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_decode_equals_the_reference(head_dim: int, group: int, dot: bool) -> None:
    config: DecodeConfig | BalancedConfig = DecodeConfig(block_tokens=16, splits=2, min_split=16, dot=dot)
    if (head_dim // 16 + group) % 2:
        config = BalancedConfig(programs=7, block_tokens=16, min_share=16, dot=dot)
    check_decode([37, -1, 66], config, kv_heads=2 if group == 1 else 1, group=group, head_dim=head_dim)


@pytest.mark.parametrize(
    "config",
    [
        *(DecodeConfig(block_tokens=32, splits=splits, min_split=32) for splits in (1, 2, 4)),
        *(BalancedConfig(programs=programs, block_tokens=32, min_share=32) for programs in (10, 12, 24)),
    ],
)
def test_decode_at_the_edges_of_pages_tiles_and_parts(config: DecodeConfig | BalancedConfig) -> None:
    check_decode([0, 1, 15, 16, 32, 33, 64, 65, 129], config, kv_heads=1)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 500])
def test_decode_sees_only_its_window(window: int) -> None:
    dot = window % 2 == 0
    check_decode([3, 16, 39, 40, 90], DecodeConfig(16, 2, min_split=16, dot=dot), kv_heads=1, window=window)
    check_decode([3, 16, 39, 40, 90], BalancedConfig(9, 16, min_share=16, dot=not dot), kv_heads=1, window=window)


def test_a_long_row_among_short_ones_is_shared_by_all_programs() -> None:
    """More parts than are combined at once, and rows of padding before, between and behind."""
    config = BalancedConfig(programs=20, block_tokens=16, min_share=16, warps=1)
    check_decode([-1, 3, -1, 200, 17, -1], config, kv_heads=1)


def test_parts_are_never_more_than_programs() -> None:
    for seed in range(3):
        lengths = torch.randint(-1, 90, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        check_decode(lengths, BalancedConfig(programs=7, block_tokens=16, min_share=16), kv_heads=1, group=1)


@pytest.mark.parametrize("dot", [True, False])
def test_decode_with_every_option(dot: bool) -> None:
    config = DecodeConfig(block_tokens=16, splits=2, min_split=32, dot=dot)
    slopes = (2.0 ** -torch.arange(1, 7)).to(DEVICE)
    check_decode([5, 70], config, kv_heads=1, group=6, slopes=slopes, rope=False)
    check_decode([5, 70], config, kv_heads=1, group=6, norm=True, softcap=2.0, window=30)
    check_decode([5, 70], config, kv_heads=1, group=6, norm=True, slopes=slopes, softcap=3.0, head_dim=96)


@pytest.mark.parametrize("dot", [True, False])
def test_decode_in_bfloat16(dot: bool) -> None:
    config = DecodeConfig(block_tokens=32, splits=2, min_split=32, dot=dot)
    check_decode([5, 100], config, kv_heads=1, group=4, head_dim=128, dtype=torch.bfloat16, norm=True)


def test_decode_of_a_large_head_combines_in_several_rounds() -> None:
    config = DecodeConfig(block_tokens=16, splits=16, min_split=16)
    check_decode([250], config, kv_heads=1, group=16, head_dim=256)


def test_a_row_has_the_same_bits_beside_others() -> None:
    """And again in the same workspace, which the first run left as it was."""
    generator = torch.Generator().manual_seed(3)
    lengths = [90, 10, 40]
    cache = make_cache(lengths, 96, 1, 64, torch.float32, generator)
    qkv = torch.randn(3, 4 * 64, generator=generator).to(DEVICE)
    outs = []
    config = DecodeConfig(block_tokens=16, splits=4, min_split=16)
    workspace = DecodeWorkspace.allocate(config.cells(3), 3, 2, 1, 64, DEVICE)
    for rows in ([0], [2, 0, 1], [0, 1]):
        out = torch.zeros(len(rows), 2 * 64, device=DEVICE)
        decode(
            qkv[rows], cache.copy().kv, LAYER, cache.tables, ints(rows), ints([lengths[row] for row in rows]), out,
            num_heads=2, scale=0.1, cos_sin=None, workspace=workspace, config=config,
        )  # fmt: skip
        outs.append(out[rows.index(0)].clone())
    assert all(torch.equal(outs[0], other) for other in outs)


def test_decode_refuses_what_does_not_fit() -> None:
    config = DecodeConfig(block_tokens=16, splits=2, min_split=16)
    generator = torch.Generator()
    cache = make_cache([4], 16, 2, 64, torch.float32, generator)
    workspace = DecodeWorkspace.allocate(config.cells(1), 1, 4, 2, 64, DEVICE)
    at = (cache.tables, ints([0]), ints([4]))

    def run(
        qkv: Tensor | None = None, kv: Tensor = cache.kv, layer: int = 0, heads: int = 4, use: Any = config, **more: Any
    ) -> None:
        rows = torch.zeros(1, (heads + 4) * 64, device=DEVICE) if qkv is None else qkv
        out = torch.zeros(1, heads * 64, device=DEVICE)
        decode(
            rows, kv, layer, *at, out, num_heads=heads, scale=1.0, cos_sin=None, workspace=workspace, config=use, **more
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"qkv must be \[1, 512\]"):
        run(torch.zeros(1, 100, device=DEVICE))
    with pytest.raises(ValueError, match="layer 2 is not in a pool of 2"):
        run(layer=2)
    with pytest.raises(ValueError, match="cannot share 2 KV heads"):
        run(heads=5)
    with pytest.raises(ValueError, match="room for 12 parts and 2 counters, 20 and 2 are needed"):
        run(use=DecodeConfig(block_tokens=16, splits=4, min_split=16))
    with pytest.raises(ValueError, match="programs must be at least 2, got 1"):
        run(use=BalancedConfig(programs=1))
    with pytest.raises(ValueError, match="must be contiguous"):
        run(kv=cache.kv.transpose(3, 4))
    with pytest.raises(ValueError, match="float16"):
        run(kv=cache.kv.half())
    with pytest.raises(ValueError, match="window must hold"):
        run(window=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"splits": 3}, "splits must be a power of two"),
        ({"block_tokens": 8, "min_split": 8}, "at least the 16 tokens"),
        ({"min_split": 40}, "multiple of block_tokens"),
        ({"stages": 0}, "stages must be at least 1"),
        ({"warps": 3}, "warps must be a power of two"),
    ],
)
def test_a_decode_config_refuses_wrong_sizes(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**wrong)


@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 256])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
@pytest.mark.parametrize("context", [1, 512, 8192, 131072])
@pytest.mark.parametrize("rounded", [False, True])
def test_decode_configs_fill_the_gpu_and_no_more(rows: int, kv_heads: int, context: int, rounded: bool) -> None:
    config = decode_config(rows, kv_heads, 128, context, 132, rounded)
    assert config.block_tokens == (64 if rounded else 32)
    if isinstance(config, BalancedConfig):
        assert config.programs > rows
        assert 4 * 132 <= config.programs * kv_heads <= max(2 * rows * kv_heads, 4 * 132 + kv_heads)
        return
    assert rows * kv_heads * config.splits <= 2 * 132
    assert config.splits <= 32
    assert context < 2048 or config.splits >= 16 or 2 * rows * kv_heads * config.splits > 132


# --------------------------------------------------------------------------------------------- write_kv


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (9, 3, 64), (4, 1, 80), (8, 8, 128)])
def test_write_kv_equals_the_reference(heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    positions = [(7 * row) % 40 if row % 4 != 3 else -1 for row in range(rows)]
    cache = make_cache([0] * rows, 48, kv_heads, head_dim, torch.float32, generator)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator).to(DEVICE)
    at = (cache.tables, torch.randperm(rows, generator=generator).int().to(DEVICE), ints(positions))
    options: dict[str, Any] = {"num_heads": heads, "cos_sin": make_turns(48, head_dim)}
    if rows != 5:
        options["qk_norm"] = make_norm(head_dim, generator)
    expected_cache = cache.copy()
    q, k = reference.write_kv(qkv, expected_cache.kv, LAYER, *at, **options)
    real = at[2] >= 0
    q_out = torch.full((rows, heads * head_dim), 7.0, device=DEVICE)
    write_kv(qkv, cache.kv, LAYER, *at, q_out, **options)
    assert (q_out[real].double() - q.flatten(1)[real]).abs().max() < 5e-6
    assert bool((q_out[~real] == 7.0).all())
    assert same_cache(cache.kv, expected_cache.kv, 5e-6)
    before = qkv.clone()
    write_kv(qkv, cache.kv, LAYER, *at, qkv[:, : heads * head_dim], keep_k=True, **options)
    both = torch.cat((q.flatten(1), k.flatten(1), before[:, (heads + kv_heads) * head_dim :].double()), 1)
    assert (qkv[real].double() - both[real]).abs().max() < 5e-6
    assert torch.equal(qkv[~real], before[~real])


def test_write_kv_without_rope_and_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = make_cache([0, 0], 32, 2, 64, torch.bfloat16, generator)
    qkv = torch.randn(3, 8 * 64, generator=generator).bfloat16().to(DEVICE)
    at = (cache.tables, ints([1, 0, 1]), ints([16, 15, 31]))
    q_out = torch.empty(3, 4 * 64, dtype=torch.bfloat16, device=DEVICE)
    write_kv(qkv, cache.kv, LAYER, *at, q_out, num_heads=4, cos_sin=None)
    assert torch.equal(q_out, qkv[:, : 4 * 64])
    assert torch.equal(cache.kv[cache.tables[1, 1].long(), LAYER, 0, :, 15].flatten(), qkv[2, 4 * 64 : 6 * 64])
    assert torch.equal(cache.kv[cache.tables[0, 0].long(), LAYER, 1, :, 15].flatten(), qkv[1, 6 * 64 :])


def test_write_kv_refuses_what_does_not_fit() -> None:
    cache = make_cache([0], 16, 2, 64, torch.float32, torch.Generator())
    at = (cache.tables, ints([0]), ints([4]))
    qkv, q_out = torch.zeros(1, 512, device=DEVICE), torch.zeros(1, 256, device=DEVICE)
    with pytest.raises(ValueError, match="qkv must be"):
        write_kv(qkv[:, :-1], cache.kv, 0, *at, q_out, num_heads=4, cos_sin=None)
    with pytest.raises(ValueError, match="q_out must be"):
        write_kv(qkv, cache.kv, 0, *at, qkv, num_heads=4, cos_sin=None)
    with pytest.raises(ValueError, match="hold layer 2"):
        write_kv(qkv, cache.kv, 2, *at, q_out, num_heads=4, cos_sin=None)


# ---------------------------------------------------------------------------------------------- prefill

CHUNKS = [(0, 1), (15, 17), (32, 16), (45, 36)]


def check_prefill(
    chunks: list[tuple[int, int]],
    config: PrefillConfig,
    *,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    fresh: bool = False,
    **options: Any,
) -> None:
    """Chunks ``(start, count)``, one a slot, with a row between them that belongs to no tile."""
    generator = torch.Generator().manual_seed(len(chunks))
    heads = kv_heads * group
    starts, counts = np.array(chunks, np.int32).T
    first = np.cumsum(counts + 1, dtype=np.int32) - counts
    tiles = make_tiles(starts, counts, np.arange(len(chunks), dtype=np.int32), first, config.tile_tokens)
    padding = np.zeros((2, TILE_WORDS), np.int32)
    given = torch.from_numpy(np.concatenate((tiles, padding))).to(DEVICE)
    rows = int(first[-1] + counts[-1])
    ends = [start + count for start, count in chunks]
    cache = make_cache(ends, max(ends), kv_heads, head_dim, dtype, generator)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype).to(DEVICE)
    q = qkv[:, : heads * head_dim]
    slots, positions = reference.tile_rows(given, rows)
    if fresh:
        turned = torch.full_like(q, NAN)
        write_kv(
            qkv, cache.kv, LAYER, cache.tables, slots, positions, turned, num_heads=heads, cos_sin=None, keep_k=True
        )  # fmt: skip
        options["fresh"] = qkv
    out = torch.full((rows, heads * head_dim), 7.0, dtype=dtype, device=DEVICE)
    scale = head_dim**-0.5
    prefill(q, cache.kv, LAYER, cache.tables, given, out, num_heads=heads, scale=scale, config=config, **options)
    options.pop("fresh", None)
    shaped = q.reshape(rows, heads, head_dim)
    expected = reference.attend(shaped, cache.kv, LAYER, cache.tables, slots, positions, scale=scale, **options)
    real = positions >= 0
    assert (out[real].double() - expected[real]).abs().max() < TOLERANCE[dtype]
    assert bool((out[~real] == 7.0).all())


@pytest.mark.parametrize(("kv_heads", "group", "pack"), [(2, 1, 1), (1, 3, 1), (1, 4, 4), (1, 8, 4)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_prefill_equals_the_reference(head_dim: int, kv_heads: int, group: int, pack: int) -> None:
    config = PrefillConfig(block_m=32 * pack, block_n=32, pack=pack)
    check_prefill(CHUNKS, config, kv_heads=kv_heads, group=group, head_dim=head_dim)


@pytest.mark.parametrize("window", [1, 15, 16, 33, 64, 1000])
def test_prefill_sees_only_its_window(window: int) -> None:
    wide, tall = PrefillConfig(block_m=16, block_n=32), PrefillConfig(block_m=64, block_n=16)
    check_prefill(CHUNKS, wide if window % 2 else tall, group=1, window=window)


def test_prefill_with_every_option() -> None:
    slopes = (2.0 ** -torch.arange(1, 5)).to(DEVICE)
    check_prefill(CHUNKS, PrefillConfig(block_m=128, block_n=32, pack=4), group=4, slopes=slopes)
    check_prefill(CHUNKS, PrefillConfig(block_m=32, block_n=32), group=1, softcap=1.5, window=40)
    packed = PrefillConfig(block_m=32, block_n=32, pack=2)
    check_prefill(CHUNKS[1:], packed, group=4, slopes=slopes, softcap=2.0, window=30)


def test_prefill_with_packed_heads_of_several_groups() -> None:
    check_prefill(CHUNKS[1:], PrefillConfig(block_m=64, block_n=32, pack=2), kv_heads=2, group=2)


def test_prefill_in_bfloat16() -> None:
    check_prefill(CHUNKS, PrefillConfig(block_m=64, block_n=64), group=1, head_dim=128, dtype=torch.bfloat16)


def test_prefill_reads_a_chunks_own_keys_from_its_rows() -> None:
    """The first chunk's from the start, others behind what is cached, on a tile's edge and off it."""
    chunks = [(0, 70), (0, 17), (32, 64), (45, 60)]
    check_prefill(chunks, PrefillConfig(block_m=32, block_n=32), kv_heads=2, group=1, fresh=True)
    check_prefill(chunks, PrefillConfig(block_m=32, block_n=16), group=1, window=40, fresh=True)


def test_prefill_refuses_what_does_not_fit() -> None:
    cache = make_cache([4], 16, 2, 64, torch.float32, torch.Generator())
    q = torch.zeros(4, 256, device=DEVICE)
    tiles = torch.tensor([[0, 0, 0, 4, 0]], dtype=torch.int32, device=DEVICE)

    def run(rows: Tensor = q, cut: Tensor = tiles, pack: int = 1, **more: Any) -> None:
        config = PrefillConfig(block_m=16, block_n=16, pack=pack)
        out = torch.zeros_like(q)
        prefill(rows, cache.kv, 0, cache.tables, cut, out, num_heads=4, scale=1.0, config=config, **more)

    with pytest.raises(ValueError, match="packed by 4"):
        run(pack=4)
    with pytest.raises(ValueError, match=r"q must be \[T, 256\]"):
        run(q[:, :200])
    with pytest.raises(ValueError, match=r"\[NT, 5\]"):
        run(cut=tiles[:, :3])
    with pytest.raises(ValueError, match="whole QKV rows"):
        run(fresh=q)
    with pytest.raises(ValueError, match="window must hold"):
        run(window=0)
    with pytest.raises(ValueError, match="block_m must be a power of two"):
        PrefillConfig(block_m=48)
    with pytest.raises(ValueError, match="pack <= block_m"):
        PrefillConfig(block_m=16, pack=32)


@pytest.mark.parametrize("tile_tokens", [1, 16, 128])
def test_tiles_cover_each_token_once_and_come_longest_first(tile_tokens: int) -> None:
    starts = np.array([0, 300, 16, 5], np.int32)
    counts = np.array([130, 16, 0, 257], np.int32)
    slots, rows = np.array([4, 2, 9, 0], np.int32), np.array([0, 130, 146, 146], np.int32)
    tiles = make_tiles(starts, counts, slots, rows, tile_tokens)
    assert tiles.dtype == np.int32
    assert len(tiles) == sum(math.ceil(count / tile_tokens) for count in counts)
    tokens = sorted((s, r + i, p + i) for s, r, p, n, _ in tiles.tolist() for i in range(n))
    wanted = sorted((s, r + i, p + i) for p, n, s, r in zip(starts, counts, slots, rows, strict=True) for i in range(n))
    assert tokens == wanted
    assert tiles[:, 3].max() <= tile_tokens
    assert {(slot, chunk) for slot, _, _, _, chunk in tiles.tolist()} == {(4, 0), (2, 300), (0, 5)}
    ends = tiles[:, 2] + tiles[:, 3]
    assert (ends[:-1] >= ends[1:]).all()


@pytest.mark.parametrize(("count", "tile_tokens"), [(1, 1), (1, 64), (64, 64), (65, 64), (200, 64), (130, 1)])
def test_one_chunk_is_cut_as_among_others(count: int, tile_tokens: int) -> None:
    one = make_tiles_of_one(37, count, 5, 8, tile_tokens)
    wanted = make_tiles(*(np.array([value], np.int32) for value in (37, count, 5, 8)), tile_tokens)
    assert one.dtype == np.int32
    assert one.tolist() == wanted.tolist()


def test_no_chunks_make_no_tiles() -> None:
    none = np.zeros(0, np.int32)
    assert make_tiles(none, none, none, none, 128).shape == (0, TILE_WORDS)
    with pytest.raises(ValueError, match="at least 1"):
        make_tiles(none, none, none, none, 0)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_prefill_configs_exist_for_each_head_size(head_dim: int) -> None:
    assert prefill_config(head_dim).tile_tokens >= 16
