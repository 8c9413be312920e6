"""Layouts: the gathers read what they should, the choice follows its rules, and the pool obeys the choice."""

from __future__ import annotations

import json

import pytest
import torch

from firsttoken.bench.layouts import conv, kv, weights
from firsttoken.bench.layouts.case import Measured, Setting
from firsttoken.bench.layouts.measure import LayoutConfig, all_measured, measure_layouts
from firsttoken.bench.layouts.timing import seconds_per_operation
from firsttoken.cli.main import main
from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.layout import choose_layout
from firsttoken.kernels.paged_attention.pool import KVPool

SMALL = Setting("cpu", "float32", 1 << 18)


# ---------------------------------------------------------------- the choice


def test_kv_is_kept_by_heads_in_slabs() -> None:
    layout = choose_layout("kv", (32, 8, 16), 128, "bfloat16", (9, 0))
    assert layout.dims == ("block", "layer", "k_or_v", "head", "token", "dim")
    assert layout.run_bytes == 16 * 128 * 2
    assert "sectors" in choose_layout("kv", (2, 3, 16), 12, "bfloat16", None).why


@pytest.mark.parametrize(("dtype", "kv_heads"), [("bfloat16", 2), ("float32", 1)])
def test_the_pool_has_the_layout_that_is_chosen(dtype: str, kv_heads: int) -> None:
    pool = KVPool(KVFormat(dtype=dtype, layers=3, kv_heads=kv_heads, head_dim=8), 5)
    layout = choose_layout("kv", (3, kv_heads, 16), 8, dtype, None)
    sizes = {"block": 5, "layer": 3, "k_or_v": 2, "head": kv_heads, "token": 16, "dim": 8}
    assert pool.storage.shape == tuple(sizes[dim] for dim in layout.dims)
    assert pool.storage.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "capability", "name"),
    [((64, 4096), (9, 0), "rows"), ((64, 4097), (9, 0), "rows_padded"), ((64, 4097), None, "rows")],
)
def test_weights_are_padded_where_rows_begin_inside_a_vector(
    shape: tuple[int, int], capability: tuple[int, int] | None, name: str
) -> None:
    assert choose_layout("weight", shape, 0, "bfloat16", capability).name == name


@pytest.mark.parametrize(
    ("channels", "capability", "name"),
    [(64, (9, 0), "nhwc"), (64, None, "nhwc"), (3, (9, 0), "nchw"), (64, (6, 1), "nchw"), (3, None, "nchw")],
)
def test_convolutions(channels: int, capability: tuple[int, int] | None, name: str) -> None:
    assert choose_layout("conv", (1, channels, 56, 56), 0, "bfloat16", capability).name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kv", (1, 1, 16), 64, "int4"), "no layout is known for elements of 'int4'"),
        (("tree", (1,), 0, "float32"), "unknown kind"),
        (("kv", (1, 16), 64, "float32"), "needs 3 sizes"),
        (("kv", (1, 1, 16), 0, "float32"), "needs 3 sizes"),
        (("weight", (0, 4), 0, "float32"), "needs 2 sizes"),
    ],
)
def test_what_no_layout_is_known_for(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_layout(*arguments, None)


# ---------------------------------------------------------------- what is measured


def test_every_layout_of_the_cache_gathers_the_same_numbers_in_the_same_order() -> None:
    layers, heads, dim, blocks = kv.LAYERS, 3, 4, 5
    logical = torch.arange(blocks * layers * 2 * heads * 16 * dim).view(blocks, layers, 2, heads, 16, dim)
    table = torch.tensor([3, 0, 4, 1, 2])
    layer = 2
    # [K or V, head, block, token, dim]: a program reads one head of many blocks.
    expected = logical[table, layer].permute(1, 2, 0, 3, 4).reshape(-1)
    axes = {"b": 0, "l": 1, "k": 2, "h": 3, "t": 4}
    for name, order in kv.ORDERS.items():
        letters = order.replace("_", "")
        storage = logical.permute([axes[letter] for letter in letters] + [5]).contiguous().view(-1)
        found = kv.Gather(order, heads, dim)._operation(storage, layer, table)().reshape(-1)
        if "_" in order:  # a token's heads come together
            found = found.view(2, blocks, 16, heads, dim).permute(0, 3, 1, 2, 4).reshape(-1)
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("layout", ["rows", "columns", "tiles", "rows_padded"])
def test_every_layout_of_a_weight_gives_a_product(layout: str) -> None:
    case = weights.Product(layout, 128, 64 if layout == "tiles" else 67)(SMALL)
    found = case.operations[0]()
    assert isinstance(found, torch.Tensor)
    assert found.numel() == 128
    assert case.nbytes == 128 * (64 if layout == "tiles" else 67) * 4


@pytest.mark.parametrize("layout", conv.LAYOUTS)
def test_windows_are_those_of_a_convolution(layout: str) -> None:
    windows = conv.Windows(layout, 32, 7)._windows(SMALL, 2)
    flat = windows.flatten(5) if windows.dim() > 6 else windows
    assert flat.shape == (2, 5, 5, 3, 3, 32)
    # Neighbouring windows overlap by all but a column.
    assert torch.equal(flat[:, :, 1, :, 0], flat[:, :, 0, :, 1])


def test_a_case_of_each_kind_runs() -> None:
    cases = [
        *(Measured("kv", name, kv.Gather(order, 2, 8), ("kv", (8, 2, 16), 8)) for name, order in kv.ORDERS.items()),
        Measured("weight", "rows", weights.Product("rows", 64, 64), ("weight", (64, 64), 0)),
        *(Measured("conv2d", name, conv.Convolution(name, 16, 9)) for name in ("nchw", "nhwc")),
    ]
    config = LayoutConfig(device="cpu", dtype="float32", nbytes=1 << 18, seconds=0.001)
    result = measure_layouts(config, cases)
    assert [row["tensor"] for row in result["layouts"]] == ["kv"] * 5 + ["weight"] + ["conv2d"] * 2
    speeds = [row["gb_s"] for row in result["layouts"][:5]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(row["share_of_peak"] == pytest.approx(row["gb_s"] / result["peak_gb_s"]) for row in result["layouts"])
    chosen = {one["tensor"]: one for one in result["chosen"]}
    assert chosen["kv"]["layout"] == "slab_heads"
    assert chosen["kv"]["best_gb_s"] == speeds[0]
    assert chosen["weight"]["best"] == chosen["weight"]["layout"] == "rows"
    assert "conv2d" not in chosen


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_everything_that_is_chosen_is_measured(capability: tuple[int, int] | None) -> None:
    cases = all_measured()
    measured = {(case.tensor, case.layout) for case in cases}
    assert len(measured) == len(cases)
    for case in cases:
        if case.asked is not None:
            assert (case.tensor, choose_layout(*case.asked, "bfloat16", capability).name) in measured


def test_candidates_are_timed_in_turns() -> None:
    calls: list[str] = []
    candidates = [[lambda: calls.append("a")], [lambda: calls.append("b")]]
    took = seconds_per_operation(candidates, "cpu", 0.0)
    assert len(took) == 2
    assert calls == ["a", "b"] * (len(calls) // 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layout", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="device must be one of"):
        measure_layouts(LayoutConfig(device="tpu"), [])


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = Measured("weight 64x64", "rows", weights.Product("rows", 64, 64), ("weight", (64, 64), 0))
    monkeypatch.setattr("firsttoken.bench.layouts.measure.all_measured", lambda: (case,))
    argv = ["bench", "layout", "--device", "cpu", "--size", "64KiB", "--seconds", "0.001"]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["layouts"][0]) == {"tensor", "layout", "gb_s", "share_of_peak"}
    assert main(argv) == 0
    assert "<- chosen" in capsys.readouterr().out
