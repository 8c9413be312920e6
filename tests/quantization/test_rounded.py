"""Rounded weights and their compressed-tensors layout, beside numbers that plain Python packs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from firsttoken.quantization.compressed import pack_words, read_linear, unpack_words, write_linear
from firsttoken.quantization.rounded import RoundedFormat, RoundedWeight, stack


def rounded(format: RoundedFormat, n: int, k: int, group: int, *, zeros: bool = False) -> RoundedWeight:
    shape = (n, k // group) if group else (n,)
    scales = torch.rand(shape).bfloat16()
    if format == "fp8":
        return RoundedWeight("fp8", (torch.randn(n, k) * 50).to(torch.float8_e4m3fn), scales, group)
    half = 8 if format == "int4" else 128
    values = torch.randint(-half, half, (n, k), dtype=torch.int8)
    points = torch.randint(-half, half, shape, dtype=torch.int8) if zeros else None
    return RoundedWeight(format, values, scales, group, points)


def meant(weight: RoundedWeight) -> Tensor:
    """One number at a time, in float64."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.float64)
    for row in range(n):
        for column in range(k):
            place = (row, column // weight.group) if weight.group else (row,)
            zero = 0.0 if weight.zeros is None else float(weight.zeros[place])
            out[row, column] = (float(weight.values[row, column]) - zero) * float(weight.scales[place])
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_values_from_their_lowest_bits(bits: int) -> None:
    half, each = 1 << (bits - 1), 32 // bits
    values = torch.randint(-half, half, (3, 13), dtype=torch.int8)
    words = pack_words(values, bits)
    for row in range(3):
        packed = 0
        for column, value in enumerate(values[row].tolist()):
            packed |= (value + half) << (bits * column)
        for index, word in enumerate(words[row].tolist()):
            assert word & 0xFFFFFFFF == packed >> (32 * index) & 0xFFFFFFFF
    assert words.shape == (3, -(-13 // each))
    assert torch.equal(unpack_words(words, bits, 13), values)


@pytest.mark.parametrize(
    ("format", "group", "zeros"),
    [
        ("int4", 32, False),
        ("int4", 64, True),
        ("int4", 0, True),
        ("int8", 0, False),
        ("int8", 32, True),
        ("fp8", 0, False),
    ],
)
def test_a_linear_is_read_as_it_was_written(format: RoundedFormat, group: int, zeros: bool) -> None:
    weight = rounded(format, 12, 64, group, zeros=zeros)
    assert torch.equal(weight.dequantized().double(), meant(weight))
    tensors = write_linear(weight)
    again = read_linear(tensors, format, (12, 64))
    assert torch.equal(again.dequantized(), weight.dequantized())
    assert tensors["weight_scale"].shape == (12, 64 // group if group else 1)
    if format != "fp8":
        assert tensors["weight_shape"].tolist() == [12, 64]
        assert set(tensors) >= {"weight_packed"} | ({"weight_zero_point"} if zeros else set())


def test_one_scale_for_all_is_one_for_each_row() -> None:
    weight = rounded("fp8", 6, 32, 0)
    got = read_linear({"weight": weight.values, "weight_scale": torch.tensor([0.5])}, "fp8", (6, 32))
    assert torch.equal(got.dequantized(), weight.values.float() * 0.5)


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_rows_move_with_their_scales(format: RoundedFormat) -> None:
    weight = rounded(format, 8, 64, 32 if format == "int4" else 0, zeros=format == "int4")
    order = torch.randperm(8)
    moved = weight.map_rows(lambda part: part[order])
    assert torch.equal(moved.dequantized(), weight.dequantized()[order])


def test_weights_of_one_kind_stack_and_others_do_not() -> None:
    plain, shifted = rounded("int4", 8, 64, 32), rounded("int4", 4, 64, 32, zeros=True)
    both = stack([plain, shifted])
    assert both is not None
    assert torch.equal(both.dequantized(), torch.cat([plain.dequantized(), shifted.dequantized()]))
    assert stack([plain, rounded("int4", 8, 64, 64)]) is None
    assert stack([plain, rounded("fp8", 8, 64, 0)]) is None


def test_groups_are_divided_without_changing_a_weight() -> None:
    weight = rounded("int4", 4, 256, 0, zeros=True)
    finer = weight.in_groups(128)
    assert finer.scales.shape == (4, 2)
    assert torch.equal(finer.dequantized(), weight.dequantized())
    with pytest.raises(ValueError, match="groups of 128 columns are not made of groups of 96"):
        finer.in_groups(96)


def test_parts_that_do_not_fit_are_refused() -> None:
    values = torch.zeros(4, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scales of 4 x 64 in groups of 32 .*float \[4, 2\], got .* \[4, 3\]"):
        RoundedWeight("int4", values, torch.zeros(4, 3), 32)
    with pytest.raises(ValueError, match="groups of 48 columns do not divide rows of 64"):
        RoundedWeight("int4", values, torch.zeros(4, 1), 48)
    with pytest.raises(ValueError, match=r"fp8 values are torch\.float8_e4m3fn, got torch\.int8"):
        RoundedWeight("fp8", values, torch.zeros(4))
    with pytest.raises(ValueError, match=r"zero points are int8 \[4, 2\]"):
        RoundedWeight("int4", values, torch.zeros(4, 2), 32, torch.zeros(4, 2))
