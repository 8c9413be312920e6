"""Linears of four and eight bits on the CPU against float64 products of their own weights."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.quantization import Linear, LinearMethod, StoredTensor, linear_method
from firsttoken.quantization.int4 import Int4Linear, WidenedInt4, layout_is_known, pack_rounded
from firsttoken.quantization.int8 import Int8Weight, WidenedInt8, pack_int8
from firsttoken.quantization.linear import ByRows
from firsttoken.quantization.on_load import quantized, rounded
from firsttoken.quantization.rounded import RoundedFormat, RoundedWeight
from firsttoken.quantization.rounded_method import INT4_ROWS, INT8_ROWS
from firsttoken.quantization.scratch import Scratch

BOUND = 6e-3  # bfloat16 in the result, and where many rows are multiplied in the weights


def int4_weight(n: int, k: int, group: int, zeros: bool) -> RoundedWeight:
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scales = (torch.rand(n, k // group) + 0.5).bfloat16() if group else (torch.rand(n) + 0.5).bfloat16()
    points = torch.randint(-8, 8, scales.shape, dtype=torch.int8) if zeros else None
    return RoundedWeight("int4", values, scales, group, points)


def int8_weight(n: int, k: int) -> RoundedWeight:
    values = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return RoundedWeight("int8", values, (torch.rand(n) + 0.5).bfloat16())


def assert_product(linear: Linear, weights: Tensor, bias: Tensor | None, rows: int) -> None:
    x = torch.randn(rows, weights.shape[1]).bfloat16()
    expected = x.double() @ weights.double().T + (0 if bias is None else bias.double())
    y = linear(x)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    # Each row of weights by itself, against what its products with such an x are like: a small one shows, too.
    usual = weights.double().norm(dim=1).clamp_min(1e-30) + (0 if bias is None else bias.double().abs())
    assert float(((y.double() - expected).abs() / usual).max()) < 5 * BOUND
    assert float((y.double() - expected).norm() / expected.norm()) < BOUND


@pytest.mark.parametrize("rows", [1, 3, INT4_ROWS, INT4_ROWS + 1])
@pytest.mark.parametrize(
    ("n", "k", "group", "zeros", "bias"),
    [
        (64, 128, 128, False, False),
        (96, 192, 64, False, True),
        (16, 96, 32, True, True),
        (50, 64, 32, False, False),
        (130, 256, 0, True, False),
    ],
)
def test_four_bits_of_a_file_multiply_as_they_are(
    n: int, k: int, group: int, zeros: bool, bias: bool, rows: int
) -> None:
    weight = int4_weight(n, k, group, zeros)
    offset = torch.randn(n) if bias else None
    linear = linear_method("int4", torch.bfloat16).linear(StoredTensor.of_rounded("w", weight), offset)
    assert_product(linear, weight.dequantized(), offset, rows)
    assert linear.nbytes < 0.8 * n * k * (1 if n > 64 else 64 / n)


@pytest.mark.parametrize("rows", [1, 5, INT8_ROWS, INT8_ROWS + 1, 70])
@pytest.mark.parametrize(("n", "k", "bias"), [(64, 128, False), (33, 48, True), (7, 1000, False), (20, 33, True)])
def test_eight_bits_of_a_file_multiply_as_they_are(n: int, k: int, bias: bool, rows: int) -> None:
    weight = int8_weight(n, k)
    offset = torch.randn(n) if bias else None
    linear = linear_method("int8", torch.bfloat16).linear(StoredTensor.of_rounded("w", weight), offset)
    assert_product(linear, weight.dequantized(), offset, rows)
    assert linear.nbytes == n * k + 2 * n


@pytest.mark.parametrize("rows", [2, 50])
def test_a_matrix_of_several_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("int4", "int8"):
        monkeypatch.setattr(f"firsttoken.quantization.{room}.PIECE", 2 * 64 * 64)
    four, eight = int4_weight(5 * 64 + 16, 64, 32, True), int8_weight(300, 64)
    scratch = Scratch()
    assert_product(WidenedInt4(pack_rounded(four), None, scratch), four.dequantized(), None, rows)
    assert_product(WidenedInt8(pack_int8(eight), None, scratch), eight.dequantized(), None, rows)


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("rows", [1, 60])
def test_zero_and_huge_weights(format: RoundedFormat, rows: int) -> None:
    weights = torch.randn(64, 128)
    weights[3] = 0.0
    weights[5] *= 1e30
    weights[7] *= 1e-30
    weights[9, 64:] = 0.0
    made = rounded(weights, format, "w")
    linear = linear_method(format, torch.bfloat16).linear(StoredTensor.dense("w", weights), None)
    assert_product(linear, made.dequantized(), None, rows)
    x = torch.randn(rows, 128).bfloat16()
    assert not linear(x)[:, 3].any()
    assert torch.isfinite(linear(x)).all()


@pytest.mark.parametrize(("format", "bound"), [("int4", 0.13), ("int8", 0.012)])
def test_rounding_on_load_is_near_and_the_same_for_every_stored_type(format: RoundedFormat, bound: float) -> None:
    weights = torch.randn(48, 256).bfloat16()
    made = rounded(weights, format, "w").dequantized()
    assert float((made - weights.float()).norm() / weights.float().norm()) < bound
    wide = rounded(weights.float(), format, "w")
    assert torch.equal(wide.dequantized(), made)
    method = linear_method(format, torch.bfloat16)
    x = torch.randn(2, 256).bfloat16()
    results = [
        method.linear(StoredTensor.dense("w", weights.to(kind)), None)(x) for kind in (torch.float32, torch.bfloat16)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_rows_do_not_see_their_neighbours(format: str) -> None:
    linear = linear_method(format, torch.bfloat16).linear(StoredTensor.dense("w", torch.randn(64, 64)), None)
    for rows in (4, 60):
        x = torch.randn(rows, 64).bfloat16()
        other = x.clone()
        other[1:] = 1000.0
        assert torch.equal(linear(x)[0], linear(other)[0])


def test_the_head_is_eight_bits_and_linears_share_what_they_write_to() -> None:
    method: LinearMethod = linear_method("int4", torch.bfloat16)
    weights = torch.randn(80, 64)
    head, rows = method.head(StoredTensor.dense("head", weights))
    assert head.nbytes == 80 * 64 + 2 * 80
    exact = rounded(weights, "int8", "head").dequantized()
    assert_product(head, exact, None, 3)
    assert rows is not None
    assert torch.equal(rows.rows(torch.tensor([79, 3])), exact[[79, 3]])
    small, large = int4_weight(64, 32, 32, False), int4_weight(128, 64, 64, True)
    linears = [method.linear(StoredTensor.of_rounded("w", weight), None) for weight in (small, large)]
    for weight, linear in zip((small, large), linears, strict=True):
        assert_product(linear, weight.dequantized(), None, 60)


def test_weights_of_a_file_are_not_read_from_it_later() -> None:
    weight = int8_weight(16, 32)
    linear = linear_method("int8", torch.bfloat16).linear(StoredTensor.of_rounded("w", weight), None)
    x = torch.randn(1, 32).bfloat16()
    before = linear(x)
    weight.values.zero_()
    weight.scales.zero_()
    assert torch.equal(linear(x), before)


def test_another_order_of_packing_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_is_known()
    monkeypatch.setattr("firsttoken.quantization.rounded_method.layout_is_known", lambda: False)
    linear = linear_method("int4", torch.bfloat16).linear(StoredTensor.dense("w", torch.randn(64, 64)), None)
    assert isinstance(linear, ByRows)
    assert isinstance(linear.few, Int4Linear)
    assert linear.limit == sys.maxsize


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"layer\.w is 16 x 40: int4 weights need columns in groups of 32"):
        linear_method("int4", torch.bfloat16).linear(StoredTensor.dense("layer.w", torch.randn(16, 40)), None)
    for format in ("int4", "int8"):
        with pytest.raises(ConfigError, match=f"'{format}' computes in bfloat16"):
            linear_method(format, torch.float32)
    with pytest.raises(ValueError, match="int8 with a scale a row"):
        pack_int8(int4_weight(16, 32, 32, False))
    with pytest.raises(ValueError, match="int4 in groups"):
        pack_rounded(int8_weight(16, 32))


def test_one_rounding_for_gpu_and_cpu() -> None:
    weights = torch.randn(32, 256)
    made = rounded(weights, "int4", "w")
    packed = quantized(weights, "int4", "w")
    assert packed.group == made.group == 128
    assert isinstance(pack_int8(rounded(weights, "int8", "w")), Int8Weight)
