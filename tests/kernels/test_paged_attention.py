"""The fast CPU attention against the float64 reference, over odd shapes and mixed steps."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import (
    AttentionContext,
    AttentionParams,
    AttentionSpec,
    KVPool,
    Segment,
    cpu,
    reference,
)
from firsttoken.kernels.paged_attention.params import QKNorm
from firsttoken.kernels.rope import RopeTable

LAYERS = 2
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def make_spec(head_dim: int, kv_heads: int, group: int) -> AttentionSpec:
    inv_freq = 1.0 / 1000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return AttentionSpec(kv_heads * group, kv_heads, head_dim, RopeTable(inv_freq, 1.1))


def make_pool(spec: AttentionSpec, blocks: int, dtype: str = "float32") -> KVPool:
    pool = KVPool(KVFormat(dtype=dtype, layers=LAYERS, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim), blocks)
    # Fresh memory may hold anything: nothing in it may reach a result.
    pool.storage.fill_(float("nan"))
    return pool


def make_segments(lengths: list[tuple[int, int]], pool: KVPool, seed: int) -> list[Segment]:
    """Segments ``(start, count)`` on shuffled, disjoint blocks."""
    free = list(range(pool.num_blocks))
    random.Random(seed).shuffle(free)
    segments = []
    for start, count in lengths:
        held = pool.format.blocks_for(start + count)
        segments.append(Segment(torch.tensor([free.pop() for _ in range(held)]), start, count))
    return segments


def run_both(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],
    *,
    dtype: str = "float32",
    norm: QKNorm | None = None,
    window: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, KVPool, KVPool]:
    """Both forms on the same pool content: ``(fast, reference, fast's pool, reference's pool)``."""
    generator = torch.Generator().manual_seed(seed)
    blocks = sum(-(-(start + count) // 16) for start, count in lengths) + 3
    pools = [make_pool(spec, blocks, dtype) for _ in range(2)]
    content = torch.randn(pools[0].storage.shape, generator=generator)
    for pool in pools:
        pool.storage.copy_(content)
    segments = make_segments(lengths, pools[0], seed)
    rows = sum(count for _, count in lengths)
    qkv = torch.randn(rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, generator=generator)
    layer = AttentionParams(1, spec, norm, window)
    context = AttentionContext.build(pools[0], segments)
    context.begin([spec], torch.cat([torch.arange(s.start, s.end) for s in segments]))
    # The block a step begins is zeroed past its tokens, which the reference has no need of.
    pools[1].storage.copy_(pools[0].storage)
    expected = reference.attend(pools[1], segments, layer, qkv)
    return context.attend(layer, qkv).double(), expected, pools[0], pools[1]


MIXES = [
    [(0, 1)],
    [(15, 1)],
    [(16, 1)],
    [(200, 1)],
    [(3, 1), (31, 1), (32, 1), (17, 1)],
    [(0, 40)],
    [(16, 16)],
    [(7, 130)],
    [(90, 1), (2, 1), (0, 33), (45, 2), (20, 1)],
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_equals_the_reference(head_dim: int, group: int, dtype: str) -> None:
    spec = make_spec(head_dim, 2, group)
    for seed, lengths in enumerate(MIXES):
        fast, expected, pool, reference_pool = run_both(spec, lengths, dtype=dtype, seed=seed)
        assert (fast - expected).abs().max() < TOLERANCE[dtype], lengths
        assert (pool.storage.float() - reference_pool.storage.float()).abs().max() < TOLERANCE[dtype], lengths


def test_qk_norm_equals_the_reference() -> None:
    spec = make_spec(64, 3, 2)
    norm = QKNorm(torch.rand(64) + 0.5, torch.rand(64) + 0.5, 1e-6)
    fast, expected, pool, reference_pool = run_both(spec, [(40, 1), (0, 20)], norm=norm)
    assert (fast - expected).abs().max() < TOLERANCE["float32"]
    assert (pool.storage - reference_pool.storage).abs().max() < TOLERANCE["float32"]


def make_slopes(heads: int) -> Tensor:
    return 2.0 ** -torch.linspace(0.5, 6.0, heads)


KINDS: dict[str, dict[str, object]] = {
    "alibi": {"rope": None, "alibi": True},
    "alibi and rope": {"alibi": True},
    "no positions": {"rope": None},
    "softcap": {"softcap": 1.5},
    "softcap and scale": {"softcap": 2.0, "scale_override": 0.5},
    "everything": {"softcap": 2.0, "scale_override": 0.3, "alibi": True},
}


def make_kind(spec: AttentionSpec, changes: dict[str, object]) -> AttentionSpec:
    given = dict(changes)
    slopes = make_slopes(spec.num_heads) if given.pop("alibi", False) else None
    return dataclasses.replace(spec, alibi_slopes=slopes, **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 16, 20, 47, 1000])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_equals_the_reference(kind: dict[str, object], window: int | None, dtype: str) -> None:
    spec = make_kind(make_spec(16, 2, 3), kind)
    for seed, lengths in enumerate(MIXES):
        fast, expected, _, _ = run_both(spec, lengths, dtype=dtype, window=window, seed=seed)
        assert (fast - expected).abs().max() < TOLERANCE[dtype], lengths


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 40])
def test_window_edges_equal_the_reference(window: int) -> None:
    """Contexts one shorter than the window, as long, and one longer; chunks that begin before and end after it."""
    spec = make_spec(8, 2, 2)
    starts = sorted({max(0, window + shift) for shift in (-2, -1, 0, 1, 15, 16, 17)})
    for lengths in ([(start, 1) for start in starts], [(start, 5) for start in starts], [(0, window + 20), (3, 150)]):
        fast, expected, _, _ = run_both(spec, lengths, window=window, seed=window)
        assert (fast - expected).abs().max() < TOLERANCE["float32"], lengths


@pytest.mark.parametrize("count", [1, 4])
def test_blocks_outside_a_window_are_not_read(count: int) -> None:
    """Their numbers may be anything, even where the block table names a block that does not exist any more."""
    spec = make_spec(16, 1, 2)
    pool = make_pool(spec, 8)
    pool.storage[3:] = 0.5
    segment = Segment(torch.tensor([0, 1, 10**6, 4, 5]), 70, count)
    context = AttentionContext.build(pool, [segment])
    context.begin([spec], torch.arange(70, 70 + count))
    layer = AttentionParams(0, spec, window=20)
    assert bool(torch.isfinite(context.attend(layer, torch.randn(count, 4 * 16))).all())


def test_layers_of_two_specs_and_windows_share_a_step() -> None:
    specs = [make_spec(8, 2, 2), AttentionSpec(4, 2, 8, RopeTable(torch.tensor([1.0, 0.5, 0.2, 0.1])))]
    layers = [
        AttentionParams(0, specs[0]),
        AttentionParams(1, specs[1], window=9),
        AttentionParams(0, specs[0], window=3),
    ]
    pools = [make_pool(specs[0], 16) for _ in range(2)]
    for pool in pools:
        pool.storage.fill_(0.1)
    segments = make_segments([(30, 1), (12, 20), (2, 1)], pools[0], 0)
    context = AttentionContext.build(pools[0], segments)
    context.begin(specs, torch.cat([torch.arange(s.start, s.end) for s in segments]))
    for layer in layers:
        qkv = torch.randn(22, 8 * 8)
        expected = reference.attend(pools[1], segments, layer, qkv)
        assert (context.attend(layer, qkv) - expected).abs().max() < TOLERANCE["float32"]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 50])), min_size=1, max_size=7
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 60)),
    kind=st.sampled_from([{}, *KINDS.values()]),
)
def test_any_mix_equals_the_reference(
    lengths: list[tuple[int, int]], kv_heads: int, group: int, window: int | None, kind: dict[str, object]
) -> None:
    spec = make_kind(make_spec(8, kv_heads, group), kind)
    fast, expected, _, _ = run_both(spec, lengths, window=window, seed=len(lengths))
    assert (fast - expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("window", [None, 7, 50])
def test_query_tiles_cover_a_long_chunk(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUERY_TILE", 32)
    monkeypatch.setattr(cpu, "MAX_SCORES", 1)
    fast, expected, _, _ = run_both(make_spec(8, 2, 2), [(5, 75)], window=window)
    assert (fast - expected).abs().max() < TOLERANCE["float32"]


def test_rows_of_very_different_length_are_padded_apart() -> None:
    table = torch.arange(200)
    lengths = [2000, 5, 1990, 9]
    rows = [cpu._Single(row, Segment(table, start, 1), 0) for row, start in enumerate(lengths)]
    assert [[single.row for single in group] for group in cpu._group_by_length(rows, 16)] == [[0, 2], [1, 3]]


def test_a_window_makes_long_and_short_rows_alike() -> None:
    table = torch.arange(200)
    rows = [cpu._Single(0, Segment(table, 2000, 1), 124), cpu._Single(1, Segment(table, 5, 1), 0)]
    assert len(cpu._group_by_length(rows, 16)) == 1


def test_only_own_slots_are_written() -> None:
    spec = make_spec(8, 2, 1)
    pool = make_pool(spec, 12)
    pool.storage.fill_(7.0)
    segment = Segment(torch.tensor([3, 9]), 14, 5)
    context = AttentionContext.build(pool, [segment])
    context.begin([spec], torch.arange(14, 19))
    context.attend(AttentionParams(0, spec), torch.randn(5, 6 * 8))
    untouched = torch.ones(pool.storage.shape, dtype=torch.bool)
    untouched[3, 0, :, :, 14:] = False
    untouched[9] = False  # begun in this step, so zeroed where not written
    assert bool((pool.storage[untouched] == 7.0).all())
    assert bool((pool.storage[9, 0, :, :, 3:] == 0).all())


@pytest.mark.parametrize("start", [32, 45])
def test_what_an_earlier_owner_left_harms_nobody(start: int) -> None:
    """A freed block full of NaN is taken by a row, which must not see it; nor must its neighbour."""
    spec = make_spec(64, 2, 2)
    pool, clean = make_pool(spec, 16), make_pool(spec, 16)
    for each in (pool, clean):
        each.storage.zero_()  # the rows' context is read without having been written here
    pool.storage[2] = float("nan")
    segments = [Segment(torch.tensor([0, 1, 2]), 32, 1), Segment(torch.tensor([4, 5, 6, 7]), start, 2)]
    qkv = torch.randn(3, 8 * 64)
    results = []
    for each in (pool, clean):
        context = AttentionContext.build(each, segments)
        context.begin([spec], torch.tensor([32, start, start + 1]))
        results.append(context.attend(AttentionParams(0, spec), qkv))
    assert bool(torch.isfinite(results[0]).all())
    assert torch.equal(results[0], results[1])


def test_a_rows_nan_stays_its_own() -> None:
    spec = make_spec(64, 1, 2)
    segments = [Segment(torch.tensor([0]), 4, 1), Segment(torch.tensor([1, 2]), 20, 1)]
    outs = []
    for poison in (0.0, float("nan")):
        pool = make_pool(spec, 4)
        pool.storage.zero_()  # the rows' context is read without having been written here
        qkv = torch.ones(2, 4 * 64)
        qkv[0] += poison
        context = AttentionContext.build(pool, segments)
        context.begin([spec], torch.tensor([4, 20]))
        outs.append(context.attend(AttentionParams(0, spec), qkv))
    assert bool(torch.isnan(outs[1][0]).any())
    assert torch.equal(outs[0][1], outs[1][1])


def test_wrong_use_is_refused() -> None:
    spec = make_spec(8, 1, 1)
    pool = make_pool(spec, 4)
    with pytest.raises(ValueError, match="cannot hold 17 tokens"):
        AttentionContext.build(pool, [Segment(torch.tensor([0]), 16, 1)])
    with pytest.raises(ValueError, match="at least one segment"):
        AttentionContext.build(pool, [])
    with pytest.raises(ValueError, match="count=0"):
        Segment(torch.tensor([0]), 0, 0)
    context = AttentionContext.build(pool, [Segment(torch.tensor([0]), 0, 2)])
    with pytest.raises(ValueError, match="hold 2 tokens, got 3"):
        context.begin([spec], torch.arange(3))
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        AttentionSpec(5, 2, 8, spec.rope)
    with pytest.raises(ValueError, match="must be even"):
        AttentionSpec(2, 2, 9, spec.rope)
    with pytest.raises(ValueError, match=r"each of the 2 query heads, got shape \[3\]"):
        AttentionSpec(2, 2, 8, None, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match="softcap must be above 0"):
        AttentionSpec(2, 2, 8, None, softcap=0.0)
    with pytest.raises(ValueError, match="at least the token itself, got 0"):
        AttentionParams(0, spec, window=0)
    with pytest.raises(ValueError, match="float16"):
        KVPool(KVFormat(dtype="float16", layers=1, kv_heads=1, head_dim=8), 1)
    with pytest.raises(ValueError, match="at least one block"):
        make_pool(spec, 0)


def test_a_block_is_one_contiguous_slab() -> None:
    pool = make_pool(make_spec(8, 2, 1), 5)
    assert pool.storage.shape == (5, LAYERS, 2, 2, 16, 8)
    assert pool.storage[3].is_contiguous()
    assert pool.storage[3].nbytes == pool.format.bytes_per_block
    assert pool.nbytes == 5 * pool.format.bytes_per_block
