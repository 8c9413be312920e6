"""Whole models in int4 and int8 on the CPU: the logits of the weights that rounding on load gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from firsttoken import LLM, SamplingParams
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import ConfigError
from firsttoken.executor.memory_plan.weights import plan_weights
from firsttoken.models import load_model
from firsttoken.models.tensors import EMBEDDING, HEAD, expected_tensors
from firsttoken.models.weights import RandomWeights
from firsttoken.quantization.on_load import rounded
from firsttoken.quantization.rounded import RoundedFormat
from tests.support.hf_families import save_model
from tests.support.tiny_models import Runner, make_checkpoint, make_config

PROMPT = torch.randint(0, 211, (45,), generator=torch.Generator().manual_seed(1)).tolist()


def tensors_of(config: ModelConfig) -> dict[str, Tensor]:
    shapes = expected_tensors(config)
    weights = RandomWeights(shapes, torch.float32)
    return {
        name: weights.matrix(name).data if len(shape) == 2 else weights.vector(name) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_logits_are_those_of_the_rounded_weights(architecture: str, format: RoundedFormat) -> None:
    changes = {"attention_bias": True} if architecture == "Qwen2ForCausalLM" else {}
    config = make_config(
        architecture,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qk_norm=architecture == "Qwen3ForCausalLM",
        **changes,
    )
    tensors = tensors_of(config)
    meant = {
        name: tensor
        if tensor.ndim == 1 or name == EMBEDDING
        else rounded(tensor, "int8" if name == HEAD else format, name).dequantized()
        for name, tensor in tensors.items()
    }
    want = Runner(load_model(make_checkpoint(config, meant), device="cpu", dtype="float32", quantization="none"))
    ours = Runner(load_model(make_checkpoint(config, tensors), device="cpu", dtype="bfloat16", quantization=format))
    expected, got = want.whole(PROMPT), ours.whole(PROMPT)
    assert float((got - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2 low caps, biases", "gemma3", "bloom"])
def test_eight_bits_in_every_family(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    full, ours = (
        Runner(load_model(open_checkpoint(str(tmp_path)), device="cpu", dtype="bfloat16", quantization=quantization))
        for quantization in ("none", "int8")
    )
    expected, got = full.whole(PROMPT), ours.whole(PROMPT)
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.08


def test_an_engine_answers_with_eight_bits() -> None:
    with LLM("random:tiny-llama", device="cpu", quantization="int8", threads=1) as llm:
        assert llm.info.quantization == "int8"
        outputs = llm.generate([[1, 2, 3], list(range(60))], SamplingParams(temperature=0, max_tokens=5))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_the_plan_of_memory_is_what_is_kept(format: str, tied: bool) -> None:
    config = make_config(hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=tied)
    tensors = tensors_of(config)
    checkpoint = make_checkpoint(config, tensors)
    model = load_model(checkpoint, device="cpu", dtype="bfloat16", quantization=format)
    vectors = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim == 1)
    assert plan_weights(checkpoint, "cpu", "bfloat16", format).kept == model.nbytes + vectors


def test_columns_that_no_groups_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_model("mistral", tmp_path)
    with pytest.raises(ConfigError, match=r"self_attn.*: int4 weights need columns in groups of 32; use"):
        load_model(open_checkpoint(str(tmp_path)), device="cpu", dtype="bfloat16", quantization="int4")
