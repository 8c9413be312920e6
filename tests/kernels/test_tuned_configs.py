"""The store of measured configs, and the choice where nothing was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear import LinearConfig, default_config, row_bucket
from firsttoken.kernels.linear.config import OP_KINDS, OpKind
from firsttoken.kernels.linear.tune import candidates
from firsttoken.kernels.packed_linear.config import PackedConfig
from firsttoken.kernels.packed_linear.config import default_config as default_packed
from firsttoken.kernels.tuning import (
    TunedFile,
    TunedLinear,
    TunedPacked,
    linear_config,
    packed_config,
    product_config,
    read_tuned,
    tuned_for,
    write_tuned,
)
from firsttoken.kernels.tuning.store import file_name

SHAPES = [(960, 576), (576, 1536), (3072, 576), (49152, 576), (6144, 4096), (4096, 14336), (128256, 4096), (7, 5)]


def test_what_comes_with_the_package_is_valid() -> None:
    tuned = tuned_for("NVIDIA H200")
    assert tuned is not None
    assert tuned.gpu == "NVIDIA H200"
    assert linear_config("residual", 4096, 14336, 1, "NVIDIA H200").kernel == "fma"
    assert linear_config("gated", 28672, 4096, 5, "NVIDIA H200").kernel == "dot"


def test_packed_products_have_theirs() -> None:
    row = packed_config("head", 128256, 4096, 1, "fp8", "NVIDIA H200")
    assert isinstance(row, LinearConfig)
    assert row.kernel == "fma"
    found = packed_config("gated", 28672, 4096, 5, "int4", "NVIDIA H200")
    assert found == PackedConfig(1, 2, warp_tiles=2)
    assert found != default_packed(28672, 4096, 5, "int4")
    assert product_config("gated", 28672, 4096, 5, "int4", "NVIDIA H200") == found
    assert product_config("gated", 28672, 4096, 5, "bfloat16", "NVIDIA H200").block_m == 8
    for format in ("int4", "fp8"):
        nobody = packed_config("plain", 6144, 4096, 1, format, "a GPU nobody tuned")
        assert nobody == default_packed(6144, 4096, 1, format)
    assert isinstance(packed_config("head", 49152, 2048, 1, "fp8", "a GPU nobody tuned"), LinearConfig)
    assert isinstance(packed_config("head", 49152, 2048, 2, "fp8", "a GPU nobody tuned"), PackedConfig)


def test_file_names() -> None:
    assert file_name("NVIDIA H200") == "h200.json"
    assert file_name("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090.json"
    assert tuned_for("../../etc/passwd") is None


@pytest.mark.parametrize("kind", OP_KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 64])
def test_any_shape_has_configs_that_fit(kind: OpKind, n: int, k: int, rows: int) -> None:
    config = linear_config(kind, n, k, rows, "a GPU nobody tuned")
    assert config == default_config(kind, n, k, rows)
    listed = candidates(kind, n, k, rows)
    assert len(listed) == len(set(listed)) >= 3
    assert rows <= 16 or len(listed) <= 24
    assert config in listed
    for one in listed:
        one.check(kind, n, k)
        assert one.block_m >= rows


def test_what_was_written_is_read(tmp_path: Path) -> None:
    entries = [
        TunedLinear("plain", 8, 4, "2-8", LinearConfig("dot", 16, 32, 4, 2, block_m=8, split_k=1, prefetch=True), 1.5),
        TunedLinear("gated", 8, 4, "1", LinearConfig("fma", 2, 64, 1, 0)),
    ]
    packed = [
        TunedPacked("plain", 16, 256, "2-8", "int4", config=PackedConfig(1, 1)),
        TunedPacked("head", 16, 256, "1", "fp8", row=LinearConfig("fma", 8, 64, 2, 4)),
    ]
    path = tmp_path / "x.json"
    write_tuned(path, TunedFile("x", entries, packed))
    assert sorted(read_tuned(path).packed, key=str) == sorted(packed, key=str)
    write_tuned(path, TunedFile("x", entries))
    read = read_tuned(path)
    assert read.gpu == "x"
    assert sorted(read.linear, key=str) == sorted(entries, key=str)
    assert len(path.read_text().splitlines()) == 7


ENTRY = (
    '{"kind":"plain","n":8,"k":64,"rows":"1","config":{"kernel":"fma","block_n":4,"block_k":64,"warps":4,"stages":0}}'
)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"plain"', '"odd"', r"Invalid enum value 'odd' - at `\$\.linear\[0\]\.kind`"),
        ('"block_n":4', '"block_n":0', r"at `\$\.linear\[0\]\.config\.block_n`"),
        ('"block_n":4', '"block_n":3', "linear[0]: linear config .* must be powers of two"),
        ('"block_k":64', '"block_k":8192', "does not fit the registers of 4 warps"),
        ('"rows":"1"', '"rows":"9-16"', "block_m = 1 cannot hold the 9-16 rows"),
        ('"stages":0', '"stages":0,"depth":1', "unknown field `depth`"),
        ('"fma"', '"dot"', "block_m must be 8, 16, 32 or 64"),
        (ENTRY, f"{ENTRY},{ENTRY}", "a second config for"),
        (ENTRY, ENTRY[:-1], "does not hold tuned configs"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"gpu":"x","linear":[' + ENTRY.replace(old, new) + "]}")
    problem = problem.replace("linear[0]:", re.escape("linear[0]:"))
    with pytest.raises(ConfigError, match=rf"x\.json.*{problem}"):
        read_tuned(path)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (TunedPacked("plain", 16, 256, "1", "int4"), "has to have a config or a row, and not both"),
        (TunedPacked("plain", 16, 256, "9-16", "int4", config=PackedConfig(1, 1)), "block_m = 8 cannot hold the 9-16"),
        (TunedPacked("plain", 16, 256, "1", "int4", config=PackedConfig(1, 4)), "divides a row of 1 chunks too finely"),
        (TunedPacked("plain", 16, 256, "1", "int4", row=LinearConfig("fma", 8, 64, 2, 4)), "1 row of fp8 by fma"),
        (TunedPacked("plain", 16, 256, "1", "fp8", row=LinearConfig("fma", 3, 64, 2, 4)), "must be powers of two"),
    ],
)
def test_packed_configs_that_do_not_fit_are_refused(tmp_path: Path, entry: TunedPacked, problem: str) -> None:
    path = tmp_path / "x.json"
    write_tuned(path, TunedFile("x", [], [entry]))
    with pytest.raises(ConfigError, match=rf"packed\[0\]: .*{problem}"):
        read_tuned(path)


def test_files_that_are_missing_or_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tuned(tmp_path / "none.json")
    path = tmp_path / "x.json"
    path.write_bytes(b" " * (1 << 21))
    with pytest.raises(ConfigError, match="at most 1048576"):
        read_tuned(path)


@pytest.mark.parametrize("rows", [0, 65])
def test_rows_beyond_the_buckets_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 64 rows, got {rows}"):
        row_bucket(rows)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (LinearConfig("fma", 8, 64, 4, 0, split_k=2), "settings of the dot kernel"),
        (LinearConfig("dot", 8, 64, 4, 2, block_m=8), "block_n must be at least 16"),
        (LinearConfig("dot", 16, 64, 4, 0, block_m=8), "stages must be at least 1"),
        (LinearConfig("dot", 128, 256, 8, 4, block_m=8), "bytes of shared memory"),
        (LinearConfig("dot", 256, 128, 2, 1, block_m=8), "does not fit the registers of 2 warps"),
        (LinearConfig("dot", 256, 64, 4, 2, block_m=64), "sums of 256 x 64 do not fit the registers of 4 warps"),
        (LinearConfig("dot", 16, 64, 4, 2, block_m=8, split_k=3), "leaves parts without any of the 4 blocks"),
        (LinearConfig("fma", 1, 64, 4, 0), "pairs of rows"),
    ],
)
def test_configs_that_do_not_fit_are_refused(config: LinearConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config.check("gated", 96, 256)
