"""The kernels between the products of many rows, and the embedding, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from firsttoken.kernels.embed import reference as embed_reference
from firsttoken.kernels.embed.triton import embed
from firsttoken.kernels.launch import launch
from firsttoken.kernels.rms_norm.reference import rms_norm
from firsttoken.kernels.rms_norm.triton import _add_rms_norm, add_rms_norm
from firsttoken.kernels.silu_mul.reference import silu_mul_interleaved
from firsttoken.kernels.silu_mul.triton import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts float32 off where the GPU rounds to the nearest bfloat16.
ROUNDING = 2**-8 if DEVICE == "cuda" else 2**-7

# The interpreter's own: it turns arrays of one element into loop bounds, and exp may overflow as on the GPU.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:overflow encountered"
)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 100), (17, 576)])
def test_add_rms_norm(rows: int, width: int) -> None:
    h, y, gain, out = randn(rows, width) * 30, randn(rows, width), torch.rand(width, device=DEVICE), randn(rows, width)
    total = h.double() + y.double()
    add_rms_norm(h, y, gain, 1e-5, out)
    torch.testing.assert_close(h.double(), total, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(out.double(), rms_norm(total, gain, 1e-5), rtol=ROUNDING, atol=1e-6)


def test_rows_may_share_a_program() -> None:
    """As they do from 1,024 rows on, which the interpreter would take seconds for."""
    h, gain = randn(5, 16), torch.rand(16, device=DEVICE)
    before, out = h.clone(), torch.empty_like(h)
    launch(_add_rms_norm, (3,), h, None, gain, out, 1e-5, 1 / 16, 5, H=16, BH=16, ROWS=2, pdl=False)
    assert torch.equal(h, before)
    torch.testing.assert_close(out.double(), rms_norm(h, gain, 1e-5), rtol=ROUNDING, atol=1e-6)


def test_norm_of_zeros_is_zero_and_may_be_in_place() -> None:
    h = torch.zeros(2, 64, device=DEVICE, dtype=torch.bfloat16)
    add_rms_norm(h, None, torch.ones(64, device=DEVICE), 1e-6, h)
    assert not h.any()
    add_rms_norm(h[:0], None, torch.ones(64, device=DEVICE), 1e-6, h[:0])


@pytest.mark.parametrize(("rows", "n"), [(1, 8), (3, 1536), (2, 1025)])
def test_silu_mul_of_interleaved_columns(rows: int, n: int) -> None:
    x, out = randn(rows, 2 * n) * 8, randn(rows, n)
    x[0, 0], x[-1, -2] = -200.0, 200.0
    silu_mul(x, out)
    torch.testing.assert_close(out.double(), silu_mul_interleaved(x), rtol=ROUNDING, atol=1e-6)


@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 64, 1), (3, 100, 5), (17, 64, 8)])
def test_embed(rows: int, width: int, parts: int) -> None:
    tokens = torch.randint(50, (20, 9), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(20, device=DEVICE)[:rows].int()
    positions = torch.randint(9, (rows,), device=DEVICE).int()
    positions[1::3] = -1
    tokens[slots[1::3].long()] = -(2**31)  # what a padding row points at must not be read
    table, gain = randn(50, width), torch.rand(width, device=DEVICE)
    h, scaled, ssq = randn(rows, width), randn(rows, width), torch.randn(rows, parts, device=DEVICE)
    before = [h.clone(), scaled.clone(), ssq.clone()]
    embed(tokens, slots, positions, table, h, gain=gain, scaled=scaled, ssq=ssq, scale=1.5)
    live = positions >= 0
    expected = embed_reference.embed(tokens, slots, positions, table, 1.5)[live]
    torch.testing.assert_close(h[live].double(), expected, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(scaled[live].double(), expected * gain.double(), rtol=ROUNDING, atol=1e-6)
    torch.testing.assert_close(ssq[live, 0].double(), expected.square().sum(-1), rtol=1e-5, atol=0)
    assert not ssq[live, 1:].any()
    for now, then in zip((h, scaled, ssq), before, strict=True):
        assert torch.equal(now[~live], then[~live])


def test_embed_alone_copies_the_rows() -> None:
    tokens, table, h = torch.arange(12, device=DEVICE).int().view(3, 4), randn(12, 32), randn(40, 32)
    slots, positions = (torch.arange(40, device=DEVICE) % 3).int(), (torch.arange(40, device=DEVICE) % 4).int()
    embed(tokens, slots, positions, table, h)
    assert torch.equal(h, table[tokens[slots.long(), positions.long()].long()])


def test_shapes_that_do_not_fit_are_refused() -> None:
    h = randn(2, 32)
    index = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"gain must be \[32\], got \[31\]"):
        add_rms_norm(h, None, torch.ones(31), 1e-5, h)
    with pytest.raises(ValueError, match=r"y must be contiguous \[2, 32\]"):
        add_rms_norm(h, h[:1], torch.ones(32), 1e-5, h)
    with pytest.raises(ValueError, match="half as many columns"):
        silu_mul(h, h)
    with pytest.raises(ValueError, match="given together"):
        embed(index[None], index, index, h, h, gain=torch.ones(32))
    with pytest.raises(ValueError, match=r"must be \[2\] as h's rows"):
        embed(index[None], index[:1], index, h, h)
