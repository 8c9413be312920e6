"""GPTQ, AWQ and what chooses between them, against plain definitions in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.quantization.calibrate.choose import Chooser, Source
from firsttoken.quantization.calibrate.gptq import damped, factor, gptq
from firsttoken.quantization.calibrate.grid import TURNED, Grid
from firsttoken.quantization.calibrate.inputs import InputMoments, Inputs
from firsttoken.quantization.calibrate.refine import descend, fitted_scales
from firsttoken.quantization.on_load import SHRINK

INT4 = Grid("int4", 32)


def mixed_inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs whose columns go together, some much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 4, columns, generator=torch.Generator().manual_seed(99))
    own = torch.randn(tokens, columns, generator=generator)
    size = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(98))]
    return (torch.randn(tokens, columns // 4, generator=generator) @ mixing + own) * size


def inputs_of(x: Tensor, full: Tensor | None = None) -> Inputs:
    gathered = InputMoments()
    full = x if full is None else full
    cut = len(x) * 3 // 4
    gathered.add(x[:cut], full[:cut])
    gathered.hold(x[cut:], full[cut:])
    return gathered.inputs()


def weights(rows: int, columns: int, seed: int = 5) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(values: Tensor, target: Tensor, moments: Tensor) -> float:
    apart = (values - target).double()
    return float(((apart @ moments.double()) * apart).sum())


def one_at_a_time(weight: Tensor, scales: Tensor, moments: Tensor, order: Tensor) -> Tensor:
    """GPTQ by its definition: the columns that are left make up for each as well as they can, by normal equations."""
    left, spread = weight.double(), INT4.spread(scales, weight.shape[1]).double()
    codes = torch.zeros_like(left)
    for at, column in enumerate(order.tolist()):
        codes[:, column] = (left[:, column] / spread[:, column]).round().clamp(-8, 7)
        missing = left[:, column] - codes[:, column] * spread[:, column]
        rest = order[at + 1 :]
        if len(rest):
            system, right = moments[rest][:, rest], moments[rest, column]
            left[:, rest] += missing[:, None] * torch.linalg.solve(system, right)[None, :]
    return codes


def test_gptq_is_the_best_that_columns_to_come_can_make_up_for() -> None:
    x, weight = mixed_inputs(400, 160), weights(7, 160)
    moments = x.t() @ x / len(x)
    scales = INT4.scales(weight, TURNED)
    found = factor(moments)
    codes = gptq(weight, scales, INT4, found)
    expected = one_at_a_time(weight, scales, damped(moments), found.order)
    # A number that lies between two codes to the last bit may go either way, and then the columns after it differ.
    assert (codes != expected).float().mean() < 0.02
    spread = INT4.spread(scales, 160)
    nearest = INT4.nearest(weight, scales) * spread
    assert error(codes * spread, weight, moments) < 0.5 * error(nearest, weight, moments)


def test_gptq_of_inputs_that_say_nothing_of_each_other_is_rounding() -> None:
    weight = weights(5, 64)
    scales = INT4.scales(weight, SHRINK)
    moments = torch.diag(torch.rand(64) + 0.1)
    assert torch.equal(gptq(weight, scales, INT4, factor(moments)), INT4.nearest(weight, scales))


@pytest.mark.parametrize("case", ["all the same", "nothing", "some never used", "fewer tokens than columns"])
def test_singular_moments_are_damped(case: str) -> None:
    x = mixed_inputs(200, 64)
    if case == "all the same":
        x = x[:, :1].expand(-1, 64).contiguous()
    elif case == "nothing":
        x = torch.zeros_like(x)
    elif case == "some never used":
        x[:, 10:20] = 0
    else:
        x = x[:3]
    weight = weights(6, 64)
    moments = x.t() @ x / len(x)
    scales = INT4.scales(weight, SHRINK)
    codes = gptq(weight, scales, INT4, factor(moments))
    assert torch.isfinite(codes).all()
    assert codes.abs().max() <= 8
    if case == "some never used":
        assert torch.equal(codes[:, 10:20], INT4.nearest(weight, scales)[:, 10:20])


def test_a_group_of_zeros_stays_zero() -> None:
    weight = weights(4, 96)
    weight[:, 32:64] = 0
    x = mixed_inputs(300, 96)
    chosen = Chooser({"a": weight}, inputs_of(x), INT4, "best").choose(None)
    kept = chosen.linears["a"].weight.dequantized()
    assert torch.isfinite(kept).all()
    assert (kept[:, 32:64] == 0).all()


def test_descent_and_fitted_scales_lower_the_error() -> None:
    x, weight = mixed_inputs(400, 96), weights(9, 96)
    moments = x.t() @ x / len(x)
    scales = INT4.scales(weight, TURNED)
    found, mixed = factor(moments), damped(moments).float()
    codes = gptq(weight, scales, INT4, found)
    errors = [error(codes * INT4.spread(scales, 96), weight, mixed)]
    for _ in range(2):
        scales = fitted_scales(weight, codes, scales, INT4, mixed)
        errors.append(error(codes * INT4.spread(scales, 96), weight, mixed))
        codes = descend(weight, codes, scales, INT4, mixed, found.order)
        errors.append(error(codes * INT4.spread(scales, 96), weight, mixed))
    assert all(after <= before * 1.001 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.97 * errors[0]


def test_fitted_scales_are_those_of_least_squares() -> None:
    x, weight = mixed_inputs(500, 64).double(), weights(3, 64)
    moments = (x.t() @ x / len(x)).float()
    first = INT4.scales(weight, SHRINK)
    codes = INT4.nearest(weight, first)
    fitted = fitted_scales(weight, codes, first, INT4, moments)
    for row in range(3):
        # One unknown a group: what the codes of the group alone would give.
        parts = torch.stack([x[:, cut] @ codes[row, cut].double() for cut in (slice(0, 32), slice(32, 64))], 1)
        solved = torch.linalg.lstsq(parts, (x @ weight[row].double())[:, None]).solution[:, 0]
        assert torch.allclose(fitted[row].double(), solved, rtol=1e-2)


def test_scales_are_those_of_least_error() -> None:
    weight = weights(3, 64)
    scales = INT4.scales(weight, TURNED)
    for row, group in itertools.product(range(3), range(2)):
        part = weight[row, group * 32 : group * 32 + 32]
        tried = [INT4.stored(part.abs().max() * (one / 7)) for one in TURNED]
        errors = [float(((part / one).round().clamp(-8, 7) * one - part).square().sum()) for one in tried]
        at = errors.index(min(errors))
        assert float(scales[row, group]) == pytest.approx(float(tried[at]))


def test_awq_spares_columns_that_matter_and_is_undone_before() -> None:
    x = torch.randn(800, 64, generator=torch.Generator().manual_seed(3))
    # Not one of them is told from the others by its weights.
    x[:, ::16] *= 30
    weight = weights(16, 64)
    source = Source(torch.arange(64), 64, lambda wanted: wanted)
    inputs = inputs_of(x)
    plain = Chooser({"a": weight}, inputs, INT4, "rtn").choose(source)
    chosen = Chooser({"a": weight}, inputs, INT4, "awq").choose(source)
    assert plain.scale is None
    assert chosen.scale is not None
    assert chosen.linears["a"].method == "awq"
    assert chosen.linears["a"].mse < 0.7 * plain.linears["a"].mse
    # The mse is that of the output once the source is divided by the scale.
    judges = x[600:]
    outputs = (judges / chosen.scale) @ chosen.linears["a"].weight.dequantized().t()
    measured = (outputs - judges @ weight.t()).square().mean()
    assert chosen.linears["a"].mse == pytest.approx(float(measured), rel=1e-3)


def test_columns_that_share_a_source_share_its_scale() -> None:
    x, weight = mixed_inputs(400, 64), weights(8, 64)
    index = torch.arange(64) % 32
    scale = Chooser({"a": weight}, inputs_of(x), INT4, "awq").choose(Source(index, 32, lambda wanted: wanted)).scale
    assert scale is None or scale.shape == (32,)


def test_the_best_is_no_worse_than_each_and_weights_make_up_for_what_came_before() -> None:
    full = mixed_inputs(1200, 96)
    drifted = full + 0.1 * full @ weights(96, 96, seed=8) / 10
    parts = {"a": weights(8, 96), "b": weights(5, 96, seed=6)}
    inputs = inputs_of(drifted, full)
    by = {method: Chooser(parts, inputs, INT4, method).choose(None).linears for method in ("rtn", "gptq", "best")}
    for name in parts:
        assert by["best"][name].mse <= min(by["rtn"][name].mse, by["gptq"][name].mse)
        assert by["gptq"][name].mse < 0.5 * by["rtn"][name].mse
        assert by["best"][name].weight.shape == parts[name].shape


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_eight_bits_have_a_scale_a_row(format: str) -> None:
    x, weight = mixed_inputs(400, 72), weights(6, 72)
    choice = Chooser({"a": weight}, inputs_of(x), Grid(format, 0), "best").choose(None).linears["a"]
    assert choice.weight.scales.shape == (6,)
    assert (choice.weight.format, choice.weight.group) == (format, 0)
    bound = 0.05 if format == "fp8" else 0.02
    assert (choice.weight.dequantized() - weight).norm() < bound * weight.norm()
    assert choice.mse < bound**2 * choice.power


def test_awq_of_eight_bits_and_groups_that_do_not_fit_are_refused() -> None:
    inputs = inputs_of(mixed_inputs(40, 72))
    for format in ("fp8", "int8"):
        with pytest.raises(ConfigError, match=f"awq is for int4: {format} has"):
            Chooser({"a": weights(2, 72)}, inputs, Grid(format, 0), "awq").choose(None)
    with pytest.raises(ConfigError, match="groups of 32 do not divide 72 columns"):
        Chooser({"a": weights(2, 72)}, inputs, INT4, "rtn").choose(None)
