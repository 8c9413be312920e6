"""Folders whose weights others have rounded: their logits are those of the numbers that are meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from firsttoken.checkpoint.hf_folder import open_folder
from firsttoken.core.errors import CheckpointError
from firsttoken.models.decoder import DecoderModel
from firsttoken.models.load import load_model
from tests.support.quantized_folders import VOCABULARY, Writer, awq, compressed, fp8, gptq, int8_rows, write_folder
from tests.support.tiny_models import Runner, make_checkpoint


def ct(format: str = "pack-quantized", ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
    }


def of_gptq(**values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | values


def of_awq(**values: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | values


ROWS = {"strategy": "channel", "group_size": None}
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "int4": (ct(), compressed()),
    "int4 with zero points": (ct(symmetric=False), compressed(zeros=True)),
    "int4 by rows": (ct(**ROWS), compressed(group=0)),
    "int4 by rows with zero points": (ct(symmetric=False, **ROWS), compressed(group=0, zeros=True)),
    "int8 in words": (ct(num_bits=8, **ROWS), compressed(bits=8, group=0)),
    "int8": (ct("int-quantized", num_bits=8, **ROWS), int8_rows),
    "fp8": (ct("float-quantized", num_bits=8, type="float", **ROWS), fp8()),
    "fp8 whole": (ct("float-quantized", num_bits=8, type="float", strategy="tensor", group_size=None), fp8(whole=True)),
    "gptq": (of_gptq(), gptq()),
    "gptq with zero points": (of_gptq(sym=False), gptq(zeros=True)),
    "gptq 2 with zero points": (of_gptq(sym=False, checkpoint_format="gptq_v2"), gptq(zeros=True, version=2)),
    "gptq by rows, static groups": (of_gptq(group_size=-1, desc_act=True, static_groups=True), gptq(group=0)),
    "gptq of 8 bits": (of_gptq(bits=8), gptq(bits=8)),
    "awq": (of_awq(), awq()),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, fp8(whole=True)),
}


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43]


def logits(folder: Path, dtype: str = "float32") -> Tensor:
    return Runner(load_model(open_folder(folder), device="cpu", dtype=dtype, quantization="none")).whole(TOKENS)


def expected(folder: Path, meant: dict[str, Tensor], dtype: str = "float32") -> Tensor:
    """Of the same model in full."""
    config = msgspec.structs.replace(open_folder(folder).config, quantized=None)
    checkpoint = make_checkpoint(config, {name: tensor.float() for name, tensor in meant.items()})
    return Runner(load_model(checkpoint, device="cpu", dtype=dtype, quantization="none")).whole(TOKENS)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers_that_are_meant(name: str, tmp_path: Path) -> None:
    quantization, writer = FORMATS[name]
    meant = write_folder(tmp_path, quantization, writer)
    want = expected(tmp_path, meant)
    assert want.std() > 0.1
    torch.testing.assert_close(logits(tmp_path), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stored"), [("int4 with zero points", "int4"), ("awq", "int4"), ("gptq", "int4"), ("int8", "int8")]
)
def test_the_cpu_multiplies_what_is_stored(name: str, stored: str, tmp_path: Path) -> None:
    quantization, writer = FORMATS[name]
    want = expected(tmp_path, write_folder(tmp_path, quantization, writer))
    model, full = (load_bfloat16(tmp_path, kind) for kind in (stored, "none"))
    assert model.layers[1].nbytes < (0.75 if stored == "int4" else 0.55) * full.layers[1].nbytes
    error, rounded_alone = ((Runner(one).whole(TOKENS) - want).norm() / want.norm() for one in (model, full))
    assert error < 2 * rounded_alone, (error, rounded_alone)


def test_the_cpu_rounds_nothing_that_a_quantized_file_holds_in_full(tmp_path: Path) -> None:
    left = "model.layers.0.mlp.down_proj"
    write_folder(tmp_path, ct(ignore=(left, "lm_head")), compressed(), full=("layers.0.mlp.down_proj", "lm_head"))
    model, full = (load_bfloat16(tmp_path, kind) for kind in ("int4", "none"))
    assert model.head.nbytes == full.head.nbytes
    assert model.layers[1].nbytes < model.layers[0].nbytes < full.layers[0].nbytes


def load_bfloat16(folder: Path, quantization: str) -> DecoderModel:
    return load_model(open_folder(folder), device="cpu", dtype="bfloat16", quantization=quantization)


@pytest.mark.parametrize("group", [64, 128])
def test_larger_groups(group: int, tmp_path: Path) -> None:
    meant = write_folder(tmp_path, of_awq(group_size=group), awq(group), hidden=128, inner=256)
    torch.testing.assert_close(logits(tmp_path), expected(tmp_path, meant), rtol=1e-4, atol=1e-5)


def test_bfloat16_rounds_the_numbers_that_are_meant_once(tmp_path: Path) -> None:
    meant = write_folder(tmp_path, of_awq(), awq())
    torch.testing.assert_close(logits(tmp_path, "bfloat16"), expected(tmp_path, meant, "bfloat16"))


def test_what_is_ignored_stays_in_full_and_the_head_may_be_rounded(tmp_path: Path) -> None:
    full = ("layers.0.mlp.down_proj", "layers.1.self_attn")
    quantization = ct(ignore=("model.layers.0.mlp.down_proj", r"re:.*layers\.1\.self_attn.*"))
    meant = write_folder(tmp_path, quantization, compressed(), full=full)
    infos = open_folder(tmp_path).tensors.infos()
    assert {name for name, info in infos.items() if info.rounded is None and "proj" in name} == {
        name for name in meant if any(part in name for part in full)
    }
    assert infos["lm_head.weight"].type == "INT4"
    assert infos["lm_head.weight"].shape == (VOCABULARY, 64)
    torch.testing.assert_close(logits(tmp_path), expected(tmp_path, meant), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(tmp_path, "bfloat16"), expected(tmp_path, meant, "bfloat16"))


def test_several_schemes_by_target(tmp_path: Path) -> None:
    """Some linears of one product in four bits and others in eight."""
    quantization = ct("mixed-precision")
    group = quantization["config_groups"]["group_0"]
    four, eight = group["weights"], group["weights"] | {"num_bits": 8, "type": "float", **ROWS}
    quantization["config_groups"] = {
        "others": {"targets": ["Linear"], "weights": four, "format": "pack-quantized"},
        "some": {"targets": [r"re:.*(k|v|gate|up|down)_proj$"], "weights": eight, "format": "float-quantized"},
    }

    def mixed(w: Any) -> Any:
        return (compressed() if w.shape == (64, 64) else fp8())(w)

    meant = write_folder(tmp_path, quantization, mixed)
    infos = open_folder(tmp_path).tensors.infos()
    assert infos["model.layers.0.self_attn.q_proj.weight"].type == "INT4"
    assert infos["model.layers.0.self_attn.k_proj.weight"].type == "FP8"
    torch.testing.assert_close(logits(tmp_path), expected(tmp_path, meant), rtol=1e-4, atol=1e-5)


NAME = "model.layers.1.mlp.up_proj"


def damage(part: str, value: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        new = value(tensors.pop(f"{NAME}.{part}", torch.empty(0)))
        if new is not None:
            tensors[f"{NAME}.{part}"] = new.contiguous()

    return change


def set_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("format", "part", "change", "message"),
    [
        ("int4", "weight_scale", lambda t: None, "weight_scale: is missing"),
        (
            "int4",
            "weight_scale",
            lambda t: t[:, :1],
            r"weight_scale: has shape \[96, 1\], the weight's gives \[96, 2\]",
        ),
        ("int4", "weight_scale", lambda t: t.int(), "weight_scale: is stored as I32, expected BF16 or F16 or F32"),
        ("int4", "weight_scale", set_first(float("nan")), r"up_proj\.weight: holds NaN or infinite numbers"),
        ("int4", "weight_packed", lambda t: t[:, :4], r"weight_packed: has 32 columns|weight_scale: has shape"),
        ("int4", "weight_packed", lambda t: t[:-1], r"weight_scale: has shape \[96, 2\], the weight's gives \[95, 2\]"),
        (
            "int4",
            "weight_shape",
            lambda t: t + 1,
            r"weight_shape: says \[97, 65\], but the weight has shape \[96, 64\]",
        ),
        (
            "int4",
            "weight",
            lambda t: torch.zeros(96, 64).half(),
            "weight: is stored in full, but .* says int4 in groups",
        ),
        ("int4", "weight_g_idx", lambda t: torch.zeros(64).int(), "weight_g_idx: is no part of such a linear"),
        (
            "int4 with zero points",
            "weight_zero_point",
            lambda t: None,
            "weight_zero_point: is missing, but .* asymmetric",
        ),
        (
            "int4 with zero points",
            "weight_zero_point",
            lambda t: t.repeat(8, 1),
            r"weight_zero_point: has shape \[96, 2\], the weight's gives \[12, 2\]",
        ),
        ("int8", "weight", lambda t: t.half(), r"weight: is stored as F16, expected I8"),
        ("fp8", "weight", lambda t: set_first(float("nan"))(t.float()).to(torch.float8_e4m3fn), "holds NaN"),
        ("fp8 whole", "weight_scale", lambda t: t * float("inf"), "holds NaN or infinite numbers"),
        ("gptq", "g_idx", lambda t: t.flip(0), "g_idx: does not number groups of 32 columns in turn: .*static_groups"),
        (
            "gptq",
            "qzeros",
            lambda t: torch.zeros_like(t),
            "qzeros: holds zero points, but quantization_config says sym",
        ),
        ("gptq with zero points", "qzeros", lambda t: t * 0 - 1, "qzeros: holds a zero point of 16, beyond the values"),
        ("gptq", "qweight", lambda t: None, "qweight: is missing"),
        ("awq", "scales", set_first(float("inf")), "holds NaN or infinite numbers"),
        ("awq", "qzeros", lambda t: t[:, :-1], r"qzeros: has shape \[2, 11\], the weight's gives \[2, 12\]"),
    ],
)
def test_damage_is_refused_by_name(
    format: str, part: str, change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    quantization, writer = FORMATS[format]
    write_folder(tmp_path, quantization, writer, change=damage(part, change))
    with pytest.raises(CheckpointError, match=message) as caught:
        logits(tmp_path)
    assert NAME in str(caught.value)


def test_needless_biases_of_zeros_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    bias = torch.zeros(96).half()
    write_folder(tmp_path, of_gptq(), gptq(), change=damage("bias", lambda t: bias))
    assert f"{NAME}.bias" not in open_folder(tmp_path).tensors.infos()
    logits(tmp_path)
    bias[3] = 1
    write_folder(tmp_path, of_gptq(), gptq(), change=damage("bias", lambda t: bias))
    with pytest.raises(CheckpointError, match=r"up_proj\.bias is not a tensor of LlamaForCausalLM"):
        logits(tmp_path)


def test_a_part_of_a_linear_that_is_in_full_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, ct(ignore=("lm_head", NAME)), compressed())
    with pytest.raises(CheckpointError, match=r"up_proj\.\w+: is part of a quantized linear, but .* leaves it in full"):
        open_folder(tmp_path)


def test_quantized_tensors_that_config_json_says_nothing_of_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, None, gptq())
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config: where another file has it"):
        open_folder(tmp_path)


def test_a_rounded_head_that_should_be_the_embedding_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, ct(ignore=()), compressed(), full=())
    config = (tmp_path / "config.json").read_text().replace('embeddings": false', 'embeddings": true')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="the file's head differs from it"):
        logits(tmp_path)
