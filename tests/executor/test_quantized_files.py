"""Folders that others have quantized, on the kernels for GPUs: laid out as they are, planned for, and computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from firsttoken.bench.roof import weight_bytes
from firsttoken.checkpoint.hf_folder import open_folder
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.plan import RowWork
from firsttoken.devices.cuda import PlannedGPU
from firsttoken.engine.resolve import resolve
from firsttoken.executor.ahead.gpus import KNOWN
from firsttoken.executor.memory_plan.weights import plan_weights
from firsttoken.kernels.packed_linear.layout import PackedWeight, unpack
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.models.fused import FusedDecoder, Projection
from firsttoken.models.load_fused import Limits, outline_fused
from firsttoken.models.many_rows import RoundedProducts
from tests.executor.test_graph_executor import Driver, Reference, make_executor
from tests.models.test_quantized_folders import FORMATS, ROWS, ct
from tests.support.graph_device import few_programs
from tests.support.quantized_folders import Writer, compressed, fp8, write_folder
from tests.support.tiny_models import make_checkpoint


def executor_of(folder: Path, quantization: str) -> Any:
    return make_executor(open_folder(folder), quantization=quantization, step_tokens=80)


def projections(model: Any) -> list[Projection]:
    assert isinstance(model, FusedDecoder)
    return [*(p for layer in model.layers for p in layer.projections), model.head]


def in_full(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return unpack(weight) if isinstance(weight, PackedWeight) else weight.float()


def mixed() -> tuple[dict[str, Any], Writer]:
    """Attention in four bits with zero points, most of the MLP in FP8, one linear of a product in full."""
    quantization = ct("mixed-precision", ignore=("lm_head", "model.layers.1.mlp.up_proj"))
    four = quantization["config_groups"]["group_0"]["weights"] | {"symmetric": False}
    quantization["config_groups"] = {
        "attention": {"targets": ["re:.*self_attn"], "weights": four, "format": "pack-quantized"},
        "mlp": {
            "targets": ["re:.*mlp"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "format": "float-quantized",
        },
    }
    return quantization, lambda w: (fp8() if 96 in w.shape else compressed(zeros=True))(w)


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("int4 with zero points", "int4 int4 int4 int4 int4 int4 int4 int4 -"),
        ("int4 by rows", "int4 int4 int4 int4 int4 int4 int4 int4 -"),
        ("gptq", "int4 int4 int4 int4 int4 int4 int4 int4 -"),
        ("fp8 whole", "fp8 fp8 fp8 fp8 fp8 fp8 fp8 fp8 -"),
        ("mixed", "int4 int4 fp8 fp8 int4 int4 - fp8 -"),
        ("in full first", "- int4 int4 int4 int4 int4 int4 int4 int4"),
    ],
)
def test_a_file_s_weights_are_laid_out_as_they_are(name: str, formats: str, tmp_path: Path) -> None:
    full: tuple[str, ...] = ("lm_head",)
    if name == "in full first":
        quantization, writer = ct(ignore=("model.layers.0.self_attn.v_proj",), **ROWS), compressed(group=0)
        full = ("layers.0.self_attn.v_proj",)
    elif name == "mixed":
        quantization, writer = mixed()
        full = ("lm_head", "layers.1.mlp.up_proj")
    else:
        quantization, writer = FORMATS[name]
    meant = write_folder(tmp_path, quantization, writer, full=full)
    checkpoint = open_folder(tmp_path)
    main = "fp8" if name == "fp8 whole" else "int4"
    model = executor_of(tmp_path, main)._model
    found = [p.weight.format if isinstance(p.weight, PackedWeight) else "-" for p in projections(model)]
    assert " ".join(found) == formats
    plain = msgspec.structs.replace(checkpoint.config, quantized=None)
    reference = make_executor(make_checkpoint(plain, {name: tensor.float() for name, tensor in meant.items()}))
    for got, expected in zip(projections(model), projections(reference._model), strict=True):
        # One of the two has scales in bfloat16, the other weights.
        torch.testing.assert_close(in_full(got.weight), in_full(expected.weight), rtol=2**-7, atol=0)
    planned = plan_weights(checkpoint, "cuda", "bfloat16", main).kept
    products = model._many_rows
    assert isinstance(products, RoundedProducts)
    scratch = 0 if products._scratch is None else products._scratch.nbytes
    gains = 4 * sum(info.num_elements for info in checkpoint.tensors.infos().values() if len(info.shape) == 1)
    assert planned == model.nbytes + scratch + gains
    sketch = outline_fused(checkpoint.config, pool_of(checkpoint), Limits(64, 4, 8, few_programs, quantization=main))
    for got, outlined in zip(projections(sketch), projections(model), strict=True):
        assert kind(got.weight) == kind(outlined.weight)


def kind(weight: torch.Tensor | PackedWeight) -> Any:
    if not isinstance(weight, PackedWeight):
        return weight.shape
    return weight.shape, weight.format, weight.group, weight.zeros is None, weight.scales.shape


def pool_of(checkpoint: Any) -> KVPool:
    from firsttoken.core.kv_format import KVFormat

    config = checkpoint.config
    kv = KVFormat(dtype="bfloat16", layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return KVPool(kv, 4)


def test_steps_of_few_and_of_many_rows_compute_with_a_file_s_weights(tmp_path: Path) -> None:
    """The first layer's attention in full, the rest with zero points."""
    quantization = ct(symmetric=False, ignore=("lm_head", "re:.*self_attn"))
    write_folder(tmp_path, quantization, compressed(zeros=True), full=("lm_head", "self_attn"), layers=1)
    driver, reference = Driver(executor_of(tmp_path, "int4")), Reference(open_folder(tmp_path))
    row, start = driver.start(0, [3, 1, 4, 1, 5])
    row.tokens += driver.step([RowWork(0, 0, 5, True)], [start])
    # Activations of more than a few rows are rounded to FP8.
    assert apart(driver.logits, reference.after(row.tokens[:-1])) < 0.1
    driver.decode([row])
    assert apart(driver.logits, reference.after(row.tokens[:-1])) < 0.03


def apart(values: Any, expected: torch.Tensor) -> float:
    return float((values[0].float().cpu() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("awq", "int8"):
        made[name] = tmp_path_factory.mktemp(name)
        write_folder(made[name], *FORMATS[name])
    return made


def test_the_file_says_what_is_chosen_and_the_log_what_was_found(folders: dict[str, Path]) -> None:
    said: list[str] = []
    checkpoint = open_folder(folders["awq"])
    _, config = resolve(EngineArgs(), checkpoint, [PlannedGPU(KNOWN["h200"])], said.append)
    assert config.executor.quantization == "int4"
    assert "14 of 15 linears are stored by awq: int4 in groups of 32 with zero points" in said
    assert "quantization = int4 (what computes with the weights as they are stored)" in said
    assert (
        weight_bytes(checkpoint, "int4", "bfloat16") == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) // 2 + 2 * 48 * 64
    )


@pytest.mark.parametrize(
    ("name", "asked", "chosen"), [("awq", "int4", "int4"), ("awq", "none", "none"), ("int8", "auto", "none")]
)
def test_what_may_be_asked_for(name: str, asked: str, chosen: str, folders: dict[str, Path]) -> None:
    args = EngineArgs(quantization=asked)
    _, config = resolve(args, open_folder(folders[name]), [PlannedGPU(KNOWN["h200"])])
    assert config.executor.quantization == chosen


@pytest.mark.parametrize(("name", "asked"), [("awq", "fp8"), ("int8", "int4")])
def test_weights_are_not_rounded_twice(name: str, asked: str, folders: dict[str, Path]) -> None:
    stored = "int4" if name == "awq" else "int8"
    with pytest.raises(ConfigError, match=rf"quantization '{asked}': the weights of .* are stored as {stored} \("):
        resolve(EngineArgs(quantization=asked), open_folder(folders[name]), [PlannedGPU(KNOWN["h200"])])
