"""What loading refuses, and ``random:`` weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Checkpoint, TensorInfo
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.models import load_model
from firsttoken.models.tensors import HEAD, expected_tensors
from tests.support.tiny_models import FakeTensors, Runner, make_checkpoint, make_config


def tensors_of(config: ModelConfig) -> dict[str, Tensor]:
    return {name: torch.full(shape, 0.01) for name, shape in expected_tensors(config).items()}


def load(checkpoint: Checkpoint, **changes: object) -> object:
    return load_model(checkpoint, **{"device": "cpu", "dtype": "float32", "quantization": "none", **changes})


def test_everything_wrong_is_named_in_one_error() -> None:
    config = make_config()
    tensors = tensors_of(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(59)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(60)
    with pytest.raises(CheckpointError) as caught:
        load(make_checkpoint(config, tensors))
    message = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight is missing (shape [88, 60])" in message
    assert "model.norm.weight has shape [59], the configuration says [60]" in message
    assert "model.layers.0.self_attn.q_proj.bias is not a tensor of LlamaForCausalLM" in message
    assert caught.value.file == "tiny-model"


def test_a_type_that_cannot_be_read_is_named_with_the_tensor() -> None:
    class Whole(FakeTensors):
        def infos(self) -> dict[str, TensorInfo]:
            return {**super().infos(), HEAD: TensorInfo(HEAD, (211, 60), "I32", 4 * 211 * 60)}

    checkpoint = make_checkpoint(make_config(), {})
    whole = dataclasses.replace(checkpoint, tensors=Whole(tensors_of(checkpoint.config)))
    with pytest.raises(CheckpointError, match=rf"{HEAD} is stored as I32, supported are BF16, F16, F32") as caught:
        load(whole)
    assert (caught.value.file, caught.value.field) == ("tiny-model", HEAD)


def test_a_flood_of_faults_is_cut() -> None:
    with pytest.raises(CheckpointError, match="and 10 more"):
        load(make_checkpoint(make_config(), {}))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Qwen2ForCausalLM", "model.layers.2.self_attn.k_proj.bias"),
        ("Qwen3ForCausalLM", "model.layers.2.self_attn.q_norm.weight"),
        ("LlamaForCausalLM", "lm_head.weight"),
    ],
)
def test_each_family_misses_its_own(architecture: str, name: str) -> None:
    config = make_config(architecture)
    tensors = tensors_of(config)
    del tensors[name]
    with pytest.raises(CheckpointError, match=name):
        load(make_checkpoint(config, tensors))


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(
        CheckpointError, match=r"unknown architecture 'GPT2LMHeadModel': known are Bloom.*, LlamaForCausalLM, Mis"
    ):
        load(make_checkpoint(make_config("GPT2LMHeadModel"), {}))


def test_qwen2_without_biases_is_refused() -> None:
    config = make_config("Qwen2ForCausalLM", attention_bias=False)
    with pytest.raises(CheckpointError, match="Qwen2 has biases"):
        load(make_checkpoint(config, tensors_of(config)))


def test_a_tied_head_may_be_written_out_only_if_it_is_the_embedding() -> None:
    config = make_config(tie_word_embeddings=True)
    tensors = tensors_of(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    load(make_checkpoint(config, tensors))
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(CheckpointError, match=r"lm_head.weight: the configuration ties the head"):
        load(make_checkpoint(config, tensors))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(name: str) -> None:
    config = make_config()
    tensors = tensors_of(config)
    tensors[name].view(-1)[5] = float("inf")
    with pytest.raises(CheckpointError, match=f"{name}: .*NaN or infinite"):
        load(make_checkpoint(config, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"quantization": "awq"}, "unknown quantization 'awq'"),
        ({"quantization": "packed"}, "computes in bfloat16"),
        ({"threads": 0}, "threads must be 1 or more"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(change: dict[str, object], message: str) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=message):
        load(make_checkpoint(config, tensors_of(config)), **change)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_are_sane_and_seeded(architecture: str, dtype: str, tokens: list[int]) -> None:
    checkpoint = make_checkpoint(make_config(architecture), {}, "random")
    shapes = {name: torch.empty(shape) for name, shape in expected_tensors(checkpoint.config).items()}
    checkpoint = make_checkpoint(checkpoint.config, shapes, "random")
    assert isinstance(checkpoint.tensors, FakeTensors)
    logits = [Runner(load(checkpoint, dtype=dtype)).whole(tokens) for _ in range(2)]
    assert torch.equal(logits[0], logits[1])
    assert 0.3 < logits[0].std() < 3
    assert len(set(logits[0].argmax(-1).tolist())) > 5


def test_sizes_are_counted(tokens: list[int]) -> None:
    config = make_config()
    model = load(make_checkpoint(config, tensors_of(config)))
    matrices = sum(t.nbytes for name, t in tensors_of(config).items() if t.dim() == 2)
    assert model.nbytes == matrices
    assert model.kv_dtype == "float32"
