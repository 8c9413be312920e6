"""Products over packed weights against float64, at odd shapes, with every epilogue; under Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.reference import best, linear
from firsttoken.kernels.linear.small import Norm, Workspace
from firsttoken.kernels.packed_linear.config import (
    SHARED_FLOATS,
    SHARED_TILES,
    PackedConfig,
    RoundedConfig,
    WideConfig,
    default_config,
    rounded_config,
)
from firsttoken.kernels.packed_linear.layout import (
    BYTE_COLUMNS,
    GROUPS,
    PackedWeight,
    empty_packed,
    pack_fp8,
    pack_int4,
    unpack,
)
from firsttoken.kernels.packed_linear.rounded import RoundedRows, as_fp8, round_rows, rounded_linear
from firsttoken.kernels.packed_linear.small import packed_linear
from firsttoken.kernels.rms_norm.reference import rms_norm
from firsttoken.quantization.on_load import quantized, round_groups

# bfloat16 keeps 8 bits of a result and e4m3 four, cut off where the interpreter converts; weights that are scaled
# before the product are rounded as well.
EXACT, ROUNDED, EIGHT_BITS = 2**-7, 2**-6, 2**-3


def random_int4(n: int, k: int, group: int, *, scale: float = 0.1, zeros: bool = False) -> PackedWeight:
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    points = torch.randint(-8, 8, (n, k // group), dtype=torch.int8) if zeros else None
    return pack_int4(values, (torch.rand(n, k // group) * scale).bfloat16(), points)


def random_fp8(n: int, k: int) -> PackedWeight:
    values = (torch.randn(n, k) * torch.rand(n, 1) * 50).to(torch.float8_e4m3fn)
    return pack_fp8(values, torch.rand(n) + 0.01)


def run(x: torch.Tensor, weight: PackedWeight, config: PackedConfig, out: torch.Tensor, **options: object) -> None:
    packed_linear(x, weight, out, config=config, **options)  # type: ignore[arg-type]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - expected).abs()
    assert (error <= tolerance * (expected.abs() + expected.abs().mean())).all(), error.max()


@pytest.mark.parametrize("group", GROUPS)
def test_int4_is_unpacked_as_it_was_packed(group: int) -> None:
    values = torch.randint(-8, 8, (40, 384), dtype=torch.int8)
    scales = torch.rand(40, 384 // group).bfloat16()
    weight = pack_int4(values, scales)
    assert torch.equal(unpack(weight), values.float() * scales.float().repeat_interleave(group, 1))
    like = empty_packed("int4", 40, 384, group, torch.device("cpu"))
    assert (like.words.shape, like.scales.shape) == (weight.words.shape, weight.scales.shape)
    zeros = torch.randint(-8, 8, (40, 384 // group), dtype=torch.int8)
    shifted = pack_int4(values, scales, zeros)
    meant = (values - zeros.repeat_interleave(group, 1)).float() * scales.float().repeat_interleave(group, 1)
    assert torch.equal(unpack(shifted), meant)
    like = empty_packed("int4", 40, 384, group, torch.device("cpu"), zeros=True)
    assert like.zeros is not None
    assert like.zeros.shape == shifted.scales.shape
    assert like.nbytes == shifted.nbytes


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales \[16, 3\] do not fit int4 weights \[16, 256\]"):
        pack_int4(torch.zeros(16, 256, dtype=torch.int8), torch.zeros(16, 3))
    with pytest.raises(ValueError, match="FP8 weights are contiguous"):
        pack_fp8(torch.zeros(16, 32), torch.zeros(16))


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "config"),
    [
        (1, 32, 256, 128, PackedConfig(1, 1)),
        (3, 24, 288, 32, PackedConfig(2, 1, ahead=2)),
        (8, 16, 512, 64, PackedConfig(1, 2, warp_tiles=2)),
        (5, 16, 1024, 128, PackedConfig(1, 4)),
        (2, 20, 768, 128, PackedConfig(1, 2)),
        (11, 16, 256, 32, PackedConfig(1, 1, 16)),
    ],
)
def test_int4_product(m: int, n: int, k: int, group: int, config: PackedConfig) -> None:
    x, weight = torch.randn(m, k).bfloat16(), random_int4(n, k, group)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    run(x, weight, config, out)
    close(out, x.double() @ unpack(weight).double().T, EXACT)


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "config"),
    [
        (3, 24, 288, 32, PackedConfig(2, 1)),
        (2, 20, 448, 64, PackedConfig(1, 2)),
        (11, 16, 384, 128, PackedConfig(1, 1, 16, ahead=2)),
        (19, 16, 160, 32, PackedConfig(1, 1, 32)),
        (17, 12, 256, 128, PackedConfig(1, 1, 32)),
    ],
)
def test_int4_product_with_zero_points(m: int, n: int, k: int, group: int, config: PackedConfig) -> None:
    x, weight = torch.randn(m, k).bfloat16(), random_int4(n, k, group, zeros=True)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    run(x, weight, config, out)
    close(out, x.double() @ unpack(weight).double().T, EXACT if m <= 16 else ROUNDED)


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 32, 128, PackedConfig(1, 1)),
        (3, 40, 208, PackedConfig(2, 1, ahead=2)),
        (9, 16, 256, PackedConfig(1, 2, 16)),
        (20, 20, 128, PackedConfig(1, 1, 32)),
    ],
)
def test_fp8_product(m: int, n: int, k: int, config: PackedConfig) -> None:
    x, weight = torch.randn(m, k).bfloat16(), random_fp8(n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    run(x, weight, config, out)
    close(out, x.double() @ unpack(weight).double().T, EXACT)


@pytest.mark.parametrize("config", [PackedConfig(1, 1, 32, warp_tiles=2), PackedConfig(1, 1, 64)])
def test_many_rows_of_x_scale_the_weights_first(config: PackedConfig) -> None:
    n = config.block_n
    x, weight = torch.randn(config.block_m - 3, 256).bfloat16(), random_int4(n, 256, 32)
    out = torch.empty(len(x), n, dtype=torch.bfloat16)
    run(x, weight, config, out)
    close(out, x.double() @ unpack(weight).double().T, ROUNDED)


def test_zero_and_huge_scales() -> None:
    values = torch.full((16, 256), 7, dtype=torch.int8)
    scales = torch.tensor([[0.0, 2.0**100], [2.0**-100, 1.0]]).repeat(8, 1)
    x = torch.ones(1, 256).bfloat16()
    out = torch.empty(1, 16, dtype=torch.bfloat16)
    for zeros in (None, torch.tensor([[-8, 7]], dtype=torch.int8).expand(16, 2)):
        weight = pack_int4(values, scales, zeros)
        run(x, weight, PackedConfig(1, 1), out)
        close(out, x.double() @ unpack(weight).double().T, EXACT)


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_epilogues(format: str) -> None:
    m, n, k = 3, 32, 256
    weight = random_int4(n, k, 128) if format == "int4" else random_fp8(n, k)
    full = unpack(weight)
    x, config = torch.randn(m, k).bfloat16(), PackedConfig(1, 1)
    squares, bias = torch.rand(m, 5) + 1, torch.randn(n)
    norm = (squares, 1e-5, k)

    gated = torch.empty(m, n // 2, dtype=torch.bfloat16)
    run(x, weight, config, gated, norm=Norm(*norm), gated=True, bias=bias)
    close(gated, linear(x, full, "gated", norm=norm, bias=bias).out, 2 * EXACT)

    residual, gain = torch.randn(m, n).bfloat16(), torch.rand(n)
    hidden, scaled, sums = residual.clone(), torch.empty_like(residual), torch.empty(m, config.tiles(n))
    run(x, weight, config, hidden, residual=hidden, next_gain=gain, scaled_out=scaled, ssq_out=sums)
    expected = linear(x, full, "residual", residual=residual, next_gain=gain)
    assert expected.scaled is not None
    assert expected.squares is not None
    close(hidden, expected.out, EXACT)
    close(scaled, expected.scaled, EXACT)
    close(sums.sum(1), expected.squares, EXACT)

    logits = torch.empty(m, n)
    tops = torch.empty(m, config.tiles(n)), torch.empty(m, config.tiles(n), dtype=torch.int32)
    run(x, weight, config, logits, norm=Norm(*norm), best=tops)
    close(logits, linear(x, full, "head", norm=norm).out, EXACT)
    value, index = best(logits)
    winner = tops[0].argmax(1)
    assert torch.equal(tops[0].max(1).values, value)
    assert torch.equal(tops[1].gather(1, winner[:, None])[:, 0].long(), index)


def workspace() -> Workspace:
    return Workspace.allocate(1 << 18, 64, torch.device("cpu"))


def as_rounded(rows: RoundedRows, weight: PackedWeight) -> torch.Tensor:
    """Rounded rows in the order of their columns."""
    values = rows.values.float()
    if weight.group:
        values = values.view(rows.rows, -1, 64)[:, :, torch.tensor(BYTE_COLUMNS).argsort()].reshape(rows.rows, -1)
    return values[:, : weight.k] * rows.scales[:, None]


@pytest.mark.parametrize("group", [0, *GROUPS])
def test_rows_are_rounded_to_fp8(group: int) -> None:
    k = 288 if group == 32 else 384
    weight = random_int4(16, k, group) if group else random_fp8(16, k)
    x, gain = torch.randn(5, k).bfloat16(), torch.rand(k)
    rows = round_rows(x, weight)
    close(as_rounded(rows, weight), x.double(), EIGHT_BITS)
    if group:
        assert rows.sums is not None
        exact = (as_rounded(rows, weight) / rows.scales[:, None]).view(5, -1, group).sum(2)
        assert torch.allclose(rows.sums.T, exact, atol=1e-2)
    normed = as_rounded(round_rows(x, weight, gain=gain, eps=1e-5), weight)
    close(normed, rms_norm(x.double(), gain.double(), 1e-5), EIGHT_BITS)
    assert torch.equal(round_rows(torch.zeros_like(x), weight).values.float(), torch.zeros(rows.values.shape))
    overflow = round_rows(torch.full_like(x, 1e30), weight, gain=gain, eps=1e-5)
    assert overflow.scales.isnan().all(), "a row whose squares overflow is not one of zeros"


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zeros", "config"),
    [
        (5, 48, 384, 128, False, RoundedConfig("int4", 128, 16, 4, 2)),
        (17, 144, 256, 64, True, RoundedConfig("int4", 128, 16, 4, 2, split=2)),
        (3, 32, 288, 32, False, RoundedConfig("int4", 32, 16, 4, 2)),
        (5, 40, 208, 0, False, RoundedConfig("fp8", 32, 16, 4, 2)),
        (18, 72, 512, 0, False, RoundedConfig("fp8", 64, 16, 4, 2, split=4)),
        (5, 48, 288, 32, True, RoundedConfig("fp8", 32, 16, 4, 2)),
    ],
)
def test_product_of_rounded_rows(m: int, n: int, k: int, group: int, zeros: bool, config: RoundedConfig) -> None:
    weight = random_int4(n, k, group, zeros=zeros) if group else random_fp8(n, k)
    x, bias, residual = torch.randn(m, k).bfloat16(), torch.randn(n), torch.randn(m, n).bfloat16()
    rows, scratch = round_rows(x, weight), torch.empty(64 * 512, dtype=torch.uint8)
    full = as_rounded(rows, weight).double() @ unpack(weight).double().T
    rounded_again = config.format == "fp8" and group

    def near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        if rounded_again:  # single values may be far off then
            assert (got.double() - expected).norm() < 0.1 * expected.norm()
        else:
            close(got, expected, tolerance)

    def product(out: torch.Tensor, **options: object) -> torch.Tensor:
        space = workspace()
        rounded_linear(rows, weight, out, workspace=space, scratch=scratch, config=config, **options)  # type: ignore[arg-type]
        assert not space.arrived.any()  # as it was found, for who comes next
        return out

    near(product(torch.empty(m, n, dtype=torch.bfloat16)), full, EXACT)
    near(product(residual.clone(), residual=residual, bias=bias), full + residual.double() + bias, EXACT)
    gated = product(torch.empty(m, n // 2, dtype=torch.bfloat16), gated=True)
    near(gated, torch.nn.functional.silu(full[:, ::2]) * full[:, 1::2], 2 * EXACT)


@pytest.mark.parametrize("zeros", [False, True])
def test_int4_as_fp8_keeps_its_bytes_order(zeros: bool) -> None:
    weight = random_int4(40, 288, 32, zeros=zeros)
    packed = as_fp8(weight, torch.empty(40 * 320, dtype=torch.uint8))
    assert (packed.format, packed.shape) == ("fp8", (40, 320))
    values = unpack(packed).view(40, -1, 64)[:, :, torch.tensor(BYTE_COLUMNS).argsort()].reshape(40, -1)
    close(values[:, :288], unpack(weight).double(), EIGHT_BITS)
    assert not values[:, 288:].any()


def test_rows_that_were_rounded_for_other_weights_are_refused() -> None:
    int4, fp8 = random_int4(16, 256, 128), random_fp8(16, 256)
    rows = round_rows(torch.randn(3, 256).bfloat16(), fp8)
    out = torch.empty(3, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows rounded for another product"):
        rounded_linear(rows, int4, out, workspace=workspace())
    with pytest.raises(ValueError, match="as long as those of the weights"):
        round_rows(torch.randn(3, 128).bfloat16(), fp8)
    with pytest.raises(ConfigError, match="leaves parts without any"):
        rounded_linear(rows, fp8, out, workspace=workspace(), config=RoundedConfig("fp8", 32, 16, 4, 2, split=4))
    config, small = RoundedConfig("fp8", 32, 16, 4, 2, split=2), Workspace.allocate(1, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="needs a workspace of"):
        rounded_linear(rows, fp8, out, workspace=small, config=config)


@pytest.mark.parametrize("rows", [9, 17, 64, 65, 200, 320, 321, 2048, 8192])
@pytest.mark.parametrize("format", ["int4", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (6144, 4096), (28672, 4096), (4096, 14336), (576, 1536)])
def test_divisions_of_rounded_rows_fit(rows: int, format: str, n: int, k: int) -> None:
    config = rounded_config(n, k, rows, format)
    if isinstance(config, WideConfig):  # `test_wide_int4`
        return
    config.check(k)
    assert config.block_m >= min(rows, 64)


def test_any_product_of_rounded_rows_has_room_where_its_parts_meet() -> None:
    for n, k in product((64, 512, 1024, 4096), (2048, 8192, 28672)):
        for rows in (*range(16, 4096, 16), 8192):
            for format in ("int4", "fp8"):
                config = rounded_config(n, k, rows, format)
                if isinstance(config, WideConfig):
                    continue
                tiles = config.tiles(n) * -(-rows // config.block_m) if config.split > 1 else 0
                assert config.workspace_floats(n, rows) <= SHARED_FLOATS, (n, k, rows, config)
                assert tiles <= SHARED_TILES, (n, k, rows, config)


def test_int4_without_scratch_is_refused() -> None:
    with pytest.raises(ValueError, match="need a scratch of 4096 bytes"):
        as_fp8(random_int4(16, 256, 128), None)


def test_divisions_that_do_not_fit_are_refused() -> None:
    weight, x = random_int4(16, 256, 128), torch.randn(9, 256).bfloat16()
    out = torch.empty(9, 16, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="takes 1 to 8 rows, got 9"):
        run(x, weight, PackedConfig(1, 1), out)
    with pytest.raises(ConfigError, match="divides a row of 1 chunks too finely"):
        run(x, weight, PackedConfig(1, 2, 16), out)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("format", ["int4", "fp8"])
@pytest.mark.parametrize(
    ("n", "k"), [(48, 32), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (576, 1536)]
)
def test_default_divisions_fit(rows: int, format: str, n: int, k: int) -> None:
    config = default_config(n, k, rows, format)
    config.check(-(-k // (256 if format == "int4" else 128)))
    assert config.block_m >= rows


def test_rounding_shrinks_outliers_where_that_is_better() -> None:
    groups = torch.randn(16, 4, 128)
    values, scales = round_groups(groups)
    plain = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    error = ((values * scales.float()[..., None] - groups) ** 2).sum(-1)
    assert (error <= (((groups / plain).round().clamp(-8, 7) * plain - groups) ** 2).sum(-1)).all()
    assert values.min() == -8
    assert values.max() <= 7
    # The largest weight of a group is often worth the value that there is only below 0.
    assert 0.2 < (scales < 0).float().mean() < 0.6


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_weights_are_rounded_on_load(format: str) -> None:
    weight = torch.randn(64, 256).bfloat16()
    packed = quantized(weight, format, "w")  # type: ignore[arg-type]
    error = (unpack(packed) - weight.float()).norm() / weight.float().norm()
    assert error < (0.12 if format == "int4" else 0.03)
    assert packed.nbytes < weight.nbytes * (0.3 if format == "int4" else 0.52)


def test_columns_that_no_group_divides_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"layers\.3\.mlp\.down_proj is 64 x 100"):
        quantized(torch.zeros(64, 100), "int4", "layers.3.mlp.down_proj")
