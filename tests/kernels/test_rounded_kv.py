"""K and V in eight and four bits: what a vector loses, the CPU's attention on them, and that cuts change nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import AttentionContext, AttentionParams, KVPool, Segment, reference
from firsttoken.kernels.paged_attention.rounded import decode, encode, hadamard
from tests.kernels.test_paged_attention import KINDS, MIXES, make_kind, make_segments, make_spec

ROUNDED = ["int8", "fp8", "int4"]
# Of the largest element: half of a 127th, half a step of e4m3 at its top, half of a fifteenth of the range; and
# bfloat16's own.
WORST = {"int8": 1 / 127 / 2 + 0.002, "fp8": 32 / 448 / 2 + 0.002, "int4": 1 / 15 + 0.01}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4])
def test_a_vector_is_close_to_what_it_was(dtype: str, scale: float) -> None:
    x = torch.randn(50, 80, generator=torch.Generator().manual_seed(1)) * scale
    x[3], x[4] = 0.0, scale
    words, scales = encode(x, dtype)
    found = decode(words, scales, dtype)
    assert words.shape == (50, 80 // (4 if dtype == "int4" else 2))
    assert ((found - x).abs().amax(-1) <= WORST[dtype] * x.abs().amax(-1)).all()
    assert bool((found[3] == 0).all())
    again = decode(*encode(found, dtype), dtype)
    assert (again - found).abs().max() < 0.01 * scale * WORST[dtype] * 60


def test_fp8_is_the_nearest_of_its_numbers() -> None:
    """The largest element is exact but for its scale's rounding; others against torch's own conversion."""
    x = torch.randn(20, 64)
    words, scales = encode(x, "fp8")
    expected = (x / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales.float()
    assert (decode(words, scales, "fp8") - expected).abs().max() <= 2**-4 * x.abs().max() / 8
    assert ((decode(words, scales, "fp8") != expected).float().mean()) < 0.01


def test_int8_loses_a_quarter_of_what_fp8_loses() -> None:
    """Of normal elements; where one is a hundred times all others, e4m3 keeps more of the others."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))

    def lost(dtype: str) -> float:
        return float((decode(*encode(x, dtype), dtype) - x).square().mean().sqrt() / x.square().mean().sqrt())

    assert lost("int8") < 0.007
    assert 0.2 < lost("int8") / lost("fp8") < 0.3
    x[:, 0] *= 100
    assert lost("int8") * 100 > lost("fp8")


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(dtype: str, bad: float) -> None:
    x = torch.ones(2, 16)
    x[0, 5] = bad
    found = decode(*encode(x, dtype), dtype)
    assert not bool(torch.isfinite(found[0]).any()) or dtype == "fp8"
    assert not bool(torch.isfinite(found[0]).all())
    assert bool(torch.isfinite(found[1]).all())


@pytest.mark.parametrize("size", [64, 80, 128])
def test_the_hadamard_matrix_keeps_products(size: int) -> None:
    matrix = hadamard(size)
    assert (matrix @ matrix - torch.eye(size)).abs().max() < 1e-5


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_against_sixteen_bits(head_dim: int) -> None:
    whole = KVFormat(dtype="bfloat16", layers=2, kv_heads=3, head_dim=head_dim).bytes_per_token
    for dtype, most in (("int8", 0.52), ("fp8", 0.52), ("int4", 0.30)):
        form = KVFormat(dtype=dtype, layers=2, kv_heads=3, head_dim=head_dim)
        assert form.bytes_per_token / whole <= most
        assert KVPool(form, 5).nbytes == 5 * form.bytes_per_block
    with pytest.raises(ValueError, match="multiple of 8 elements, got 12"):
        KVFormat(dtype="int4", layers=1, kv_heads=1, head_dim=12)


def make_pool(kv_heads: int, head_dim: int, blocks: int, dtype: str, fill: int = 0) -> KVPool:
    pool = KVPool(KVFormat(dtype=dtype, layers=2, kv_heads=kv_heads, head_dim=head_dim), blocks)
    pool.storage.fill_(fill)
    return pool


def attend(pool: KVPool, segments: list[Segment], layer: AttentionParams, qkv: Tensor) -> Tensor:
    context = AttentionContext.build(pool, segments)
    context.begin([layer.spec], torch.cat([torch.arange(s.start, s.end) for s in segments]))
    return context.attend(layer, qkv)


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("kind", [{}, *KINDS.values()], ids=["plain", *KINDS])
def test_attention_equals_the_reference(kind: dict[str, object], dtype: str, activations: torch.dtype) -> None:
    """What the context was before is anything that a pool may hold; only the step's own vectors are rounded here."""
    spec = make_kind(make_spec(24 if "rope" in kind else 64, 2, 3), kind)
    for seed, lengths in enumerate(MIXES):
        window = (None, 20)[seed % 2]
        blocks = sum(-(-(start + count) // 16) for start, count in lengths) + 2
        pool = make_pool(2, spec.head_dim, blocks, dtype)
        segments = make_segments(lengths, pool, seed)
        width = (spec.num_heads + 4) * spec.head_dim
        # Every position before the step comes by another step, which the reference does not see.
        for segment in segments:
            if segment.start:
                before = dataclasses.replace(segment, start=0, count=segment.start)
                attend(pool, [before], AttentionParams(1, spec), torch.randn(segment.start, width))
        other = make_pool(2, spec.head_dim, blocks, dtype)
        other.storage.copy_(pool.storage)
        qkv = torch.randn(sum(count for _, count in lengths), width).to(activations)
        layer = AttentionParams(1, spec, window=window)
        found = attend(pool, segments, layer, qkv)
        expected = reference.attend(other, segments, layer, qkv)
        # A tie is rounded either way, which moves one element by a step.
        assert (found.double() - expected).abs().mean() < (2e-3 if activations == torch.float32 else 1e-2), lengths
        assert (found.double() - expected).abs().max() < (0.1 if activations == torch.float32 else 0.2), lengths
        same = (pool.storage == other.storage).float().mean()
        assert same > 0.98 if activations == torch.float32 else same > 0.9


@pytest.mark.parametrize("dtype", ROUNDED)
def test_where_a_prompt_is_cut_changes_nothing_that_is_kept(dtype: str) -> None:
    spec = make_spec(64, 2, 2)
    layer, table = AttentionParams(0, spec), torch.tensor([2, 0, 3])
    qkv = torch.randn(40, 8 * 64)
    whole, cut = make_pool(2, 64, 4, dtype), make_pool(2, 64, 4, dtype)
    one = attend(whole, [Segment(table, 0, 40)], layer, qkv)
    parts = [
        attend(cut, [Segment(table, start, end - start)], layer, qkv[start:end])
        for start, end in ((0, 7), (7, 8), (8, 31), (31, 40))
    ]
    assert torch.equal(whole.storage, cut.storage)
    assert (torch.cat(parts) - one).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_an_earlier_owner_left_harms_nobody(dtype: str) -> None:
    spec = make_spec(64, 1, 2)
    outs = []
    for fill in (-1, 0):  # every scale and every element NaN
        pool = make_pool(1, 64, 4, dtype, fill)
        qkv = torch.ones(20, 4 * 64) / 3
        attend(pool, [Segment(torch.tensor([1, 3]), 0, 19)], AttentionParams(0, spec), qkv[:19])
        outs.append(attend(pool, [Segment(torch.tensor([1, 3]), 19, 1)], AttentionParams(0, spec), qkv[19:]))
    assert bool(torch.isfinite(outs[0]).all())
    assert torch.equal(outs[0], outs[1])
