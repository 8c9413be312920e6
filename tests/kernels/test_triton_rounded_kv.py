"""The GPU attention kernels on K and V in eight and four bits, against float64: on a GPU, else interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.kernels.paged_attention import gpu_reference as reference
from firsttoken.kernels.paged_attention.gpu_config import (
    BalancedConfig,
    DecodeConfig,
    PrefillConfig,
    make_tiles,
)
from firsttoken.kernels.paged_attention.pages import pages_of
from firsttoken.kernels.paged_attention.rounded import decode as decoded
from firsttoken.kernels.paged_attention.rounded import encode
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace, decode
from firsttoken.kernels.paged_attention.triton_prefill import prefill
from firsttoken.kernels.paged_attention.triton_write import write_kv
from tests.kernels.test_triton_attention import DEVICE, LAYER, LAYERS, Cache, ints, make_norm, make_turns

ROUNDED = ["int8", "fp8", "int4"]
# The interpreter multiplies in float32; a GPU in bfloat16, whose steps are 2^-8 of a score.
TOLERANCE = 1e-4 if DEVICE == "cpu" else 2e-2
TYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def make_cache(
    lengths: list[int], room: int, kv_heads: int, head_dim: int, rounded: str, generator: torch.Generator
) -> Cache:
    """Shuffled blocks with the first ``lengths[slot]`` positions of each slot; all else is NaN, elements and scales."""
    width = -(-room // 16)
    order = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    form = KVFormat(dtype=rounded, layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim)
    kv = KVPool(form, order.numel()).storage.fill_(-1)
    tables = order.int()
    for slot, length in enumerate(lengths):
        if length:
            rows = torch.randn(length, 3 * kv_heads * head_dim, generator=generator)
            slots = torch.full((length,), slot, dtype=torch.int32)
            at = (tables, slots, torch.arange(length, dtype=torch.int32))
            reference.write_kv(rows, kv, LAYER, *at, num_heads=kv_heads, cos_sin=None, rounded=rounded)
    return Cache(kv.to(DEVICE), tables.to(DEVICE))


def nearly(found: Tensor, expected: Tensor) -> bool:
    """All but a few of the words: a tie, or a sum in another order, may be rounded the other way."""
    return bool((found == expected).float().mean() > 0.99)


def check_decode(
    positions: list[int],
    config: DecodeConfig | BalancedConfig,
    rounded: str,
    *,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 64,
    rope: bool = True,
    norm: bool = False,
    **options: Any,
) -> None:
    generator = torch.Generator().manual_seed(len(positions))
    rows, heads = len(positions), kv_heads * group
    slots = torch.randperm(rows, generator=generator).int()
    lengths = [0] * rows
    for row, position in enumerate(positions):
        lengths[int(slots[row])] = max(position, 0)
    cache = make_cache(lengths, max(positions) + 1, kv_heads, head_dim, rounded, generator)
    expected_kv = cache.kv.clone()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator).to(TYPE).to(DEVICE)
    qkv[[row for row, position in enumerate(positions) if position < 0]] = float("nan")
    turns = make_turns(max(positions) + 1, head_dim) if rope else None
    qk_norm = make_norm(head_dim, generator) if norm else None
    at = (cache.tables, slots.to(DEVICE), ints(positions))
    out = torch.full((rows, heads * head_dim), 7.0, dtype=TYPE, device=DEVICE)
    workspace = DecodeWorkspace.allocate(config.cells(rows), rows, heads, kv_heads, head_dim, DEVICE)
    more: dict[str, Any] = {"num_heads": heads, "cos_sin": turns, "qk_norm": qk_norm, "rounded": rounded}
    rules: dict[str, Any] = {"scale": head_dim**-0.5, **options}
    decode(qkv, cache.kv, LAYER, *at, out, workspace=workspace, config=config, **more, **rules)
    q, _ = reference.write_kv(qkv, expected_kv, LAYER, *at, **more)
    assert nearly(cache.kv, expected_kv)
    expected = reference.attend(q, cache.kv, LAYER, *at, rounded=rounded, **rules)
    real = at[2] >= 0
    assert (out[real].double() - expected[real]).abs().max() < TOLERANCE
    assert bool((out[~real] == 7.0).all())
    assert bool((workspace.arrived == 0).all())


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128), (8, 64)])
def test_decode_equals_the_reference(rounded: str, group: int, head_dim: int) -> None:
    options: dict[str, Any] = {"group": group, "head_dim": head_dim}
    check_decode([37, -1, 66], DecodeConfig(32, splits=2, min_split=32), rounded, **options)
    check_decode([37, -1, 50, 0], BalancedConfig(programs=5, block_tokens=32, min_share=32), rounded, **options)


@pytest.mark.parametrize("rounded", ROUNDED)
def test_decode_with_every_option(rounded: str) -> None:
    config = DecodeConfig(block_tokens=16, splits=2, min_split=32)
    slopes = (2.0 ** -torch.arange(1, 7)).to(DEVICE)
    check_decode([5, 70], config, rounded, group=6, slopes=slopes, rope=False)
    check_decode([5, 70], config, rounded, group=6, norm=True, softcap=2.0, window=30)
    check_decode([0, 1, 15, 16, 17, 33], DecodeConfig(splits=1), rounded, norm=True)


@pytest.mark.parametrize("rounded", ROUNDED)
def test_write_kv_equals_the_reference_and_keeps_what_is_read(rounded: str) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = [(7 * row) % 40 if row % 4 != 3 else -1 for row in range(19)]
    cache = make_cache([0] * 19, 48, 2, 64, rounded, generator)
    qkv = torch.randn(19, 8 * 64, generator=generator).to(DEVICE)
    at = (cache.tables, torch.randperm(19, generator=generator).int().to(DEVICE), ints(positions))
    options: dict[str, Any] = {"num_heads": 4, "cos_sin": make_turns(48, 64), "rounded": rounded}
    options["qk_norm"] = make_norm(64, generator)
    expected_kv, before = cache.kv.clone(), qkv.clone()
    q, k = reference.write_kv(qkv, expected_kv, LAYER, *at, **options)
    write_kv(qkv, cache.kv, LAYER, *at, qkv[:, : 4 * 64], keep_k=True, **options)
    assert nearly(cache.kv, expected_kv)
    real = at[2] >= 0
    assert (qkv[real, : 4 * 64].double() - q.flatten(1)[real]).abs().max() < 1e-5
    kept = [decoded(*encode(x, rounded), rounded) for x in (k[real], before.view(19, 8, 64)[real, 6:])]
    error = (qkv[real, 4 * 64 :] - torch.cat(kept, 1).flatten(1)).abs()
    assert (error > 1e-4).float().mean() < 0.01
    assert torch.equal(qkv[~real], before[~real])


@pytest.mark.parametrize("rounded", ROUNDED)
def test_what_is_not_finite_is_told_from_what_is(rounded: str) -> None:
    cache = make_cache([0, 0], 16, 1, 64, rounded, torch.Generator())
    qkv = torch.ones(2, 3 * 64, device=DEVICE)
    qkv[0, 64:] = float("inf")
    at = (cache.tables, ints([0, 1]), ints([0, 0]))
    write_kv(qkv, cache.kv, LAYER, *at, qkv[:, :64], num_heads=1, cos_sin=None, keep_k=True, rounded=rounded)
    assert not bool(torch.isfinite(qkv[0, 64:].view(2, 64)).all(-1).any())
    assert bool(torch.isfinite(qkv[1]).all())


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize(("head_dim", "pack", "window"), [(64, 1, None), (128, 2, 20)])
def test_prefill_equals_the_reference(rounded: str, head_dim: int, pack: int, window: int | None) -> None:
    """And has the same bits whether a chunk's own keys come from its rows or from the pages."""
    chunks = [(0, 20), (29, 18), (32, 1)]
    generator = torch.Generator().manual_seed(3)
    config = PrefillConfig(block_m=16 * pack, block_n=16, pack=pack)
    starts, counts = np.array(chunks, np.int32).T
    first = np.cumsum(counts, dtype=np.int32) - counts
    tiles = make_tiles(starts, counts, np.arange(3, dtype=np.int32), first, config.tile_tokens)
    given, rows = torch.from_numpy(tiles).to(DEVICE), int(counts.sum())
    cache = make_cache(starts.tolist(), int((starts + counts).max()), 1, head_dim, rounded, generator)
    qkv = torch.randn(rows, 4 * head_dim, generator=generator).to(TYPE).to(DEVICE)
    q = qkv[:, : 2 * head_dim]
    slots, positions = reference.tile_rows(given, rows)
    at = (cache.tables, slots, positions)
    write_kv(qkv, cache.kv, LAYER, *at, q, num_heads=2, cos_sin=None, keep_k=True, rounded=rounded)
    rules: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "rounded": rounded}
    outs = []
    for fresh in (qkv, None):
        outs.append(torch.full_like(q, 7.0))
        prefill(
            q, cache.kv, LAYER, cache.tables, given, outs[-1], num_heads=2, config=config, fresh=fresh, **rules
        )  # fmt: skip
    expected = reference.attend(q.reshape(rows, 2, head_dim), cache.kv, LAYER, *at, **rules)
    assert (outs[0].double() - expected).abs().max() < TOLERANCE
    assert torch.equal(outs[0], outs[1])


def test_what_the_kernels_cannot_read_is_refused() -> None:
    small = KVPool(KVFormat(dtype="int4", layers=1, kv_heads=1, head_dim=32), 1).storage
    with pytest.raises(ValueError, match="heads of a power of two, 64 or more"):
        pages_of(small, "int4")
    with pytest.raises(ValueError, match="one of int8, fp8, int4, got 'int3'"):
        pages_of(small, "int3")
    with pytest.raises(ValueError, match="must be contiguous"):
        pages_of(small[0], "fp8")
    with pytest.raises(ValueError, match=r"may have 137438953472 words of 16 bits, got \d+: use fewer blocks"):
        pages_of(torch.empty(1 << 32, 1, 1, 1056, dtype=torch.int16, device="meta"), "int8")
    with pytest.raises(ValueError, match="set dot"):
        check_decode([3], DecodeConfig(dot=False), "fp8")
