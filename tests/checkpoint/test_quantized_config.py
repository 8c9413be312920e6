"""What ``quantization_config`` may say: schemes by name, and refusals that name the key and its value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.read import read_scheme
from firsttoken.checkpoint.quantized.scheme import LinearScheme
from firsttoken.core.errors import CheckpointError
from tests.models.test_quantized_folders import ROWS, ct, of_awq, of_gptq

LINEARS = (
    *(
        f"model.layers.{layer}.{name}_proj"
        for layer in range(4)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    ),
    "lm_head",
)


def read(quantization: dict[str, Any], key: str = "quantization_config", linears: Iterable[str] = LINEARS) -> Any:
    return read_scheme(JSONObject("config.json", {key: quantization}), linears)


def test_weights_in_full() -> None:
    assert read_scheme(JSONObject("config.json", {"quantization_config": None}), LINEARS) is None


def test_the_older_key_of_compressed_tensors() -> None:
    assert (
        str(read(ct(symmetric=False), "compression_config"))
        == "compressed-tensors: int4 in groups of 32 with zero points"
    )


def test_only_linears_are_rounded() -> None:
    scheme = read(ct(ignore=()))
    assert scheme.of("lm_head.weight") == LinearScheme("int4", 32, False, "words")
    assert scheme.of("model.embed_tokens.weight") is None
    assert scheme.of("model.layers.0.input_layernorm.weight") is None


def test_the_most_specific_target_decides() -> None:
    quantization = ct(ignore=())
    weights = quantization["config_groups"]["group_0"]["weights"]
    quantization["config_groups"] |= {
        "pattern": {"targets": [r"re:model\.layers\.\d+\.mlp"], "weights": weights | {"group_size": 64}},
        "name": {"targets": ["model.layers.3.mlp.up_proj"], "weights": weights | {"group_size": 128}},
    }
    scheme = read(quantization)
    names = ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.down_proj", "model.layers.3.self_attn.o_proj")
    assert [scheme.of(name).group for name in names] == [128, 64, 32]
    assert scheme.main_format(names) == "int4"


def test_awq_skips_by_parts_of_names() -> None:
    scheme = read(of_awq(modules_to_not_convert=["self_attn", "layers.1.mlp.up"]))
    assert scheme.of("model.layers.0.self_attn.q_proj") is None
    assert scheme.of("model.layers.1.mlp.up_proj") is None
    assert scheme.of("model.layers.0.mlp.up_proj") is not None
    assert scheme.of("lm_head") is None


def test_gptq_s_head() -> None:
    assert read(of_gptq()).of("lm_head") is None
    assert read(of_gptq(lm_head=True)).of("lm_head") is not None


def with_group(**values: Any) -> dict[str, Any]:
    quantization = ct()
    quantization["config_groups"]["group_0"] |= values
    return quantization


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method: 'bitsandbytes' is not supported, only compressed-tensors, gptq",
        ),
        ({}, "quant_method: is missing"),
        (ct(num_bits=3), "weights.num_bits: 3 of type 'int' in pack-quantized are not supported"),
        (ct(num_bits=4, type="float"), "num_bits: 4 of type 'float'"),
        (ct("nvfp4-pack-quantized"), "format: 'nvfp4-pack-quantized' is not supported"),
        (ct(group_size=48), "group_size: is 48: -1 or a multiple of 32"),
        (ct(actorder="group"), "actorder: is 'group': .*actorder 'weight' or 'static'"),
        (ct(dynamic=True), "dynamic: is True"),
        (ct("float-quantized", num_bits=8, type="float", strategy="block", group_size=None), "strategy: 'block'"),
        (ct("float-quantized", num_bits=8, type="float", symmetric=False, **ROWS), "symmetric: is false: FP8"),
        (ct() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: is .*num_bits"),
        (ct() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format: 'sparse-24-bitmask'"),
        (ct() | {"transform_config": {"config_groups": 1}}, "transform_config: is"),
        (ct() | {"config_groups": {}}, "config_groups: is missing"),
        (ct() | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16: is a preset by name"),
        (ct() | {"ignore": ["re:("]}, r"ignore: 're:\(' is not a pattern"),
        (
            ct() | {"ignore": ["re:(?!model).*"]},
            r"is not a pattern that is taken \(invalid perl operator: \(\?!\): say",
        ),
        (ct() | {"ignore": ["re:" + "a" * 1001]}, "longer than 1000 characters"),
        (ct() | {"ignore": [f"re:{n}" for n in range(20_000)]}, "ignore: has 20000 patterns, at most 1000"),
        (of_awq(modules_to_not_convert=[str(n) for n in range(20_000)]), "has 20001 .*for 29 linears, at most 17241"),
        (with_group(targets=["LlamaMLP"]), "targets: 'LlamaMLP' is neither Linear"),
        (with_group(weights=None), "group_0: says nothing of weights"),
        (with_group(output_activations={"num_bits": 8}), "output_activations: is not supported"),
        (with_group(input_activations={"num_bits": 4}), "input_activations.num_bits: is 4"),
        (of_gptq(bits=3), "bits: is 3"),
        (of_gptq(group_size=16), "group_size: is 16"),
        (of_gptq(checkpoint_format="marlin"), "checkpoint_format: 'marlin'"),
        (of_gptq(dynamic={"-:.*down.*": {}}), "dynamic: is"),
        (of_awq(version="gemv"), "version: 'gemv'"),
        (of_awq(bits=8), "bits: is 8"),
        (of_awq(zero_point=False), "zero_point: is false"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"weight_block_size: is \[128, 128\]"),
    ],
)
def test_what_would_not_be_honoured_is_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(quantization)


@pytest.mark.parametrize("pattern", ["(a+)+$", ".?" * 60 + "x$", "(.|..|...)" * 40 + "x$", ".*.*.*.*.*.*x"])
def test_no_pattern_takes_longer_than_its_load(pattern: str) -> None:
    quantization = ct(ignore=(f"re:{pattern}",))
    assert len(read(quantization, linears=[*LINEARS, f"model.{'a' * 4000}_proj"]).linears) == len(LINEARS) + 1
