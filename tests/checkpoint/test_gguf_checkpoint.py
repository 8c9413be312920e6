"""A GGUF file as a checkpoint: configuration, vocabulary, end tokens, canonical tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from firsttoken.checkpoint.dequantize import dequantize
from firsttoken.checkpoint.gguf import GGUFFile
from firsttoken.checkpoint.gguf_checkpoint import half_split_rows, open_gguf
from firsttoken.checkpoint.gguf_config import llama3_divisors
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.model_config import RopeConfig
from firsttoken.core.errors import CheckpointError

Permute = Callable[[np.ndarray, int], np.ndarray]


def values(checkpoint: Any, name: str) -> np.ndarray:
    info = checkpoint.tensors.infos()[name]
    return dequantize(checkpoint.tensors.data(name), info.type, info.shape)


def test_config_and_vocabulary(write_gguf: Any) -> None:
    checkpoint = open_gguf(write_gguf())
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (8, 64, 96, 1)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 128)
    assert config.rope == RopeConfig(theta=5000.0)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings
    assert not any((config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.dtype == "float32"
    assert tokenizer is not None
    assert tokenizer.gguf is not None
    assert tokenizer.gguf.tokens[6] == "é"
    assert tokenizer.gguf.merges == ["a b"]
    assert (tokenizer.gguf.kind, tokenizer.gguf.pre, tokenizer.gguf.eos_id) == ("gpt2", "smollm", 2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.special_tokens == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.add_bos is None
    assert checkpoint.chat_template == "{{ messages }}"
    assert (checkpoint.name, checkpoint.source) == ("model", "gguf")


def test_every_end_token_counts(write_gguf: Any) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(4)
        writer.add_add_bos_token(False)
        writer.add_bos_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 9)

    checkpoint = open_gguf(write_gguf(extra=extra))
    # The metadata's eos and eot, then the control token that is a known end marker.
    assert checkpoint.generation.eos_token_ids == (2, 4, 7)
    assert checkpoint.generation.bos_token_id == 1
    assert (checkpoint.generation.temperature, checkpoint.generation.top_k) == (0.5, 9)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.add_bos is False


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_llama_q_and_k_rows_return_to_hugging_face_order(
    kind: str, write_gguf: Any, tensors_written: dict[str, np.ndarray], permute: Permute
) -> None:
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(64, dtype=np.float32)
    q, k = tensors_written["blk.0.attn_q.weight"], tensors_written["blk.0.attn_k.weight"]
    checkpoint = open_gguf(
        write_gguf(
            kind=gguf.GGMLQuantizationType[kind],
            tensors={
                "blk.0.attn_q.weight": permute(q, 4),
                "blk.0.attn_k.weight": permute(k, 2),
                "blk.0.attn_q.bias": permute(bias, 4),
            },
        )
    )
    prefix = "model.layers.0.self_attn."
    tolerance = {"F32": 0.0, "F16": 1e-2, "BF16": 3e-2, "Q8_0": 5e-2, "Q4_1": 0.6}[kind]
    for name, expected in (("q_proj.weight", q), ("k_proj.weight", k), ("v_proj.weight", None)):
        expected = tensors_written["blk.0.attn_v.weight"] if expected is None else expected
        np.testing.assert_allclose(values(checkpoint, prefix + name), expected, atol=tolerance)
    assert np.array_equal(values(checkpoint, prefix + "q_proj.bias"), bias)
    assert checkpoint.config.attention_bias
    assert checkpoint.config.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def test_half_split_rows_undo_the_converter(permute: Permute) -> None:
    rows = np.arange(3 * 10)
    assert np.array_equal(permute(rows, 3)[half_split_rows(3, 10)], rows)


def test_qwen_rows_stay_as_they_are(write_gguf: Any, tensors_written: dict[str, np.ndarray]) -> None:
    norm = np.ones(16, dtype=np.float32)
    checkpoint = open_gguf(
        write_gguf(
            "qwen3",
            tensors={
                "blk.0.attn_q_norm.weight": norm,
                "blk.0.attn_k_norm.weight": norm,
                "output.weight": np.ones((8, 64), dtype=np.float32),
            },
        )
    )
    assert checkpoint.config.architecture == "Qwen3ForCausalLM"
    assert checkpoint.config.qk_norm
    assert not checkpoint.config.tie_word_embeddings
    q = checkpoint.tensors.data("model.layers.0.self_attn.q_proj.weight")
    assert q.tobytes() == tensors_written["blk.0.attn_q.weight"].tobytes()
    assert "model.layers.0.self_attn.q_norm.weight" in checkpoint.tensors.infos()
    assert "lm_head.weight" in checkpoint.tensors.infos()


def test_data_that_keeps_its_order_is_a_view_of_the_file(write_gguf: Any) -> None:
    tensors = open_gguf(write_gguf()).tensors
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        data = tensors.data(name)
        assert not data.flags.owndata
        assert not data.flags.writeable
    assert tensors.data("model.embed_tokens.weight").shape == (8, 256)
    assert tensors.data("model.norm.weight").shape == (256,)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        tensors.data("lm_head.weight")


def test_qwen2_has_attention_bias_and_head_dim_may_be_given(write_gguf: Any) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_value_length(32)

    config = open_gguf(write_gguf("qwen2", extra=extra)).config
    assert config.attention_bias
    assert not config.output_bias
    assert config.head_dim == 32


def test_linear_and_yarn_scaling(write_gguf: Any) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(2.0)

    assert open_gguf(write_gguf(extra=linear)).config.rope == RopeConfig(theta=5000.0, kind="linear", factor=4.0)
    rope = open_gguf(write_gguf(extra=yarn)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1))


def test_rope_factors_are_recognised_as_llama_3(write_gguf: Any) -> None:
    wanted = RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=32.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )

    def theta(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(64)
        writer.add_value_length(64)
        writer.kv_data[0]["llama.rope.freq_base"] = gguf.GGUFValue(500000.0, gguf.GGUFValueType.FLOAT32)

    factors = llama3_divisors(wanted, 64).astype(np.float32)
    assert factors[0] == 1.0
    assert factors[-1] == 32.0
    checkpoint = open_gguf(write_gguf(extra=theta, tensors={"rope_freqs.weight": factors}))
    assert checkpoint.config.rope == wanted
    assert "rope_freqs.weight" not in checkpoint.tensors.infos()
    ones = open_gguf(write_gguf(tensors={"rope_freqs.weight": np.ones(8, dtype=np.float32)}))
    assert ones.config.rope == RopeConfig(theta=5000.0)
    odd = np.linspace(1, 3, 8, dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_gguf(write_gguf(tensors={"rope_freqs.weight": odd}))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_gguf(write_gguf(tensors={"rope_freqs.weight": np.ones(7, dtype=np.float32)}))


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (lambda w: w.add_sliding_window(64), "llama.attention.sliding_window"),
        (lambda w: w.add_expert_count(8), "llama.expert_count"),
        (lambda w: w.add_value_length(8), "llama.attention.value_length"),
        (lambda w: w.add_rope_dimension_count(8), "llama.rope.dimension_count"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "llama.rope.scaling.type"),
        (lambda w: w.add_uint16("split.count", 3), "split.count"),
        (lambda w: w.add_type("adapter"), "general.type"),
        (lambda w: w.add_vocab_size(2), "tokenizer.ggml.eos_token_id"),
        (lambda w: w.add_logit_scale(2.0), "llama.logit_scale"),
        (lambda w: w.add_pad_token_id(8), "tokenizer.ggml.padding_token_id"),
        (lambda w: w.add_token_scores([1.0]), "tokenizer.ggml.scores"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(extra: Any, field: str, write_gguf: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        _ = open_gguf(write_gguf(extra=extra)).generation
    assert caught.value.field == field


def test_a_window_as_long_as_the_context_is_harmless(write_gguf: Any) -> None:
    assert open_gguf(write_gguf(extra=lambda w: w.add_sliding_window(128))).config.max_position == 128


def test_unknown_architecture_lists_the_known(write_gguf: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'gemma'.*llama, qwen2, qwen3"):
        open_gguf(write_gguf("gemma"))


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "bloom"])
def test_families_that_are_only_read_from_folders_say_so(arch: str, write_gguf: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{arch} models are not read from GGUF files: use the folder") as caught:
        open_gguf(write_gguf(arch))
    assert caught.value.field == "general.architecture"


def test_a_tensor_the_architecture_does_not_have_is_named(write_gguf: Any) -> None:
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_qkv\.weight"):
        open_gguf(write_gguf(tensors={"blk.0.attn_qkv.weight": np.ones((4, 64), dtype=np.float32)}))


def test_misshapen_q_is_named_when_read(write_gguf: Any) -> None:
    tensors = open_gguf(write_gguf(tensors={"blk.0.attn_q.weight": np.ones((60, 64), dtype=np.float32)})).tensors
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight"):
        tensors.data("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.model
def test_the_default_model() -> None:
    checkpoint = open_checkpoint("smollm2", offline=True)
    assert checkpoint.name == "smollm2"
    published = open_checkpoint("random:smollm2-135m").config
    assert checkpoint.config.rms_norm_eps == pytest.approx(published.rms_norm_eps)
    for attribute in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        assert getattr(checkpoint.config, attribute) == getattr(published, attribute)
    assert checkpoint.config.rope == published.rope
    assert 2 in checkpoint.generation.eos_token_ids
    # Its makers' advice, which the file lacks: at OpenAI's temperature of 1 it writes nonsense.
    assert (checkpoint.generation.temperature, checkpoint.generation.top_p) == (0.2, 0.9)
    assert open_checkpoint(checkpoint.path).generation.temperature is None
    infos = checkpoint.tensors.infos()
    expected = open_checkpoint("random:smollm2-135m").tensors.infos()
    assert {name: info.shape for name, info in infos.items()} == {name: info.shape for name, info in expected.items()}
    file = GGUFFile(Path(checkpoint.path))
    stored = file.raw(file.tensors["blk.7.attn_k.weight"]).reshape(192, -1)
    interleaved = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_1)
    hf = interleaved.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    assert np.array_equal(values(checkpoint, "model.layers.7.self_attn.k_proj.weight"), hf)
    assert checkpoint.tokenizer is not None
    vocabulary = checkpoint.tokenizer.gguf
    assert vocabulary is not None
    assert (len(vocabulary.tokens), len(vocabulary.token_types), len(vocabulary.merges)) == (49152, 49152, 48900)
    assert vocabulary.tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # Every merge makes a token, so both lists were cut at the right places.
    known = set(vocabulary.tokens)
    assert all("".join(merge.split(" ")) in known for merge in vocabulary.merges)


@pytest.mark.clock
@pytest.mark.model
def test_the_default_model_opens_fast() -> None:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        open_checkpoint("smollm2", offline=True)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.25


def test_a_default_that_no_request_may_have_is_the_files_fault(write_gguf: Any) -> None:
    path = write_gguf(extra=lambda w: w.add_float32("general.sampling.temp", -1.0))
    with pytest.raises(
        CheckpointError, match=r"general\.sampling\.temp: temperature must be a finite number"
    ) as caught:
        _ = open_gguf(path).generation
    assert caught.value.file == str(path)
