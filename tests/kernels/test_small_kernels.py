"""RMSNorm, LayerNorm, RoPE and the gates against their references."""

from __future__ import annotations

import pytest
import torch

from firsttoken.kernels.gelu import gelu, gelu_mul
from firsttoken.kernels.gelu import reference as gelu_reference
from firsttoken.kernels.layer_norm import LayerNorm
from firsttoken.kernels.layer_norm.reference import layer_norm
from firsttoken.kernels.rms_norm import RMSNorm
from firsttoken.kernels.rms_norm.reference import rms_norm
from firsttoken.kernels.rope import RopeTable, to_pair_order
from firsttoken.kernels.rope.reference import apply_rope
from firsttoken.kernels.silu_mul import silu_mul
from firsttoken.kernels.silu_mul.reference import silu_mul as silu_mul_reference


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm(rows: int, scale: float) -> None:
    x, weight = torch.randn(rows, 100) * scale, torch.rand(100) + 0.5
    expected = rms_norm(x, weight, 1e-5)
    assert torch.allclose(RMSNorm(weight, 1e-5, torch.float32)(x).double(), expected, rtol=1e-5, atol=1e-6)
    half = RMSNorm(weight, 1e-5, torch.bfloat16)(x)
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_layer_norm(rows: int, scale: float) -> None:
    x, weight, bias = (torch.randn(rows, 100) + 0.5) * scale, torch.rand(100) + 0.5, torch.randn(100)
    expected = layer_norm(x, weight, bias, 1e-5)
    assert torch.allclose(LayerNorm(weight, bias, 1e-5, torch.float32)(x).double(), expected, rtol=1e-5, atol=1e-5)
    half = LayerNorm(weight.bfloat16(), bias.bfloat16(), 1e-5, torch.bfloat16)(x)
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.double(), expected, rtol=2**-6, atol=2**-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not RMSNorm(torch.ones(8), 1e-6, torch.float32)(torch.zeros(2, 8)).any()


def test_rotation_equals_sines_and_cosines() -> None:
    table = RopeTable(1.0 / 10000.0 ** (torch.arange(0, 80, 2).float() / 80), scaling=1.2)
    positions = torch.tensor([0, 1, 17, 8191])
    x = torch.randn(4, 3, 80)
    pairs = torch.view_as_complex(x.view(4, 3, 40, 2))
    rotated = torch.view_as_real(pairs * table.rotation(positions).unsqueeze(1)).flatten(-2)
    assert torch.allclose(rotated.double(), apply_rope(x, positions, table), atol=1e-5)


def test_pair_order_puts_halves_side_by_side() -> None:
    rows = torch.arange(12)  # two heads of 6: pairs (0, 3), (1, 4), (2, 5) and so on
    assert to_pair_order(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    matrix = torch.randn(12, 5)
    assert torch.equal(to_pair_order(matrix, 2), matrix[to_pair_order(rows, 2)])


@pytest.mark.parametrize("rows", [1, 5])
def test_silu_mul(rows: int) -> None:
    x = torch.randn(rows, 24) * 4
    assert torch.allclose(silu_mul(x).double(), silu_mul_reference(x), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 24) * 4).to(dtype)
    close = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"atol": 1e-5}
    assert gelu(x).dtype == gelu_mul(x).dtype == dtype
    assert torch.allclose(gelu(x).double(), gelu_reference.gelu(x), **close)
    assert torch.allclose(gelu_mul(x).double(), gelu_reference.gelu_mul(x), **close)
