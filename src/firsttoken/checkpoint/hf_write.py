"""A model's files in Hugging Face layout, but for its weights: copied from a folder, or written from a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.hf_config import read_config
from firsttoken.checkpoint.hf_folder import CONFIG_FILE, GENERATION_FILE, read_folder_config
from firsttoken.checkpoint.hf_tokenizer import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.model_config import GenerationConfig, GGUFVocabulary, ModelConfig, RopeConfig
from firsttoken.core.errors import CheckpointError

# Of a folder: what is neither weights nor configuration and still part of the model.
_COPIED = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TEMPLATE_FILE,
    GENERATION_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
    "LICENSE.txt",
)


def write_text_files(checkpoint: Checkpoint, folder: Path, tokenizer_json: str | None) -> None:
    """Everything but ``config.json`` and weights. ``tokenizer_json`` is the tokenizer of a model that comes from a GGUF
    file. Raises `CheckpointError` for files of the model that are damaged."""
    if checkpoint.source == "folder":
        source = Path(checkpoint.path)
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    generation = _generation(checkpoint.generation)
    _write(folder / GENERATION_FILE, generation)
    spec = checkpoint.tokenizer
    if tokenizer_json is None or spec is None or spec.gguf is None:
        return
    (folder / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
    _write(folder / TOKENIZER_CONFIG_FILE, _tokenizer_config(spec.gguf, checkpoint))


def config_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` of the model: its own, or one that is read back as the same configuration. Raises
    `CheckpointError` where that cannot be."""
    if checkpoint.source == "folder":
        return dict(read_folder_config(Path(checkpoint.path)).values)
    values = _config(checkpoint.config) | _ends(checkpoint.generation)
    written = JSONObject(CONFIG_FILE, msgspec.json.decode(json.dumps(values)))
    if (back := read_config(written)) != checkpoint.config:
        raise CheckpointError(
            f"has a configuration that config.json cannot hold: {back} instead of {checkpoint.config}",
            file=checkpoint.path,
        )
    return values


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    _write(folder / CONFIG_FILE, values)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _config(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "dtype": config.dtype,
    }
    return values | ({} if config.rope is None else _rope(config.rope))


def _rope(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind == "default":
        return values
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        scaling |= {name: value for name in names if (value := getattr(rope, name)) is not None}
    return values | {"rope_scaling": scaling}


def _ends(generation: GenerationConfig) -> dict[str, Any]:
    ends = list(generation.eos_token_ids)
    return {"bos_token_id": generation.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _generation(generation: GenerationConfig) -> dict[str, Any]:
    names = ("pad_token_id", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return _ends(generation) | {name: value for name in names if (value := getattr(generation, name)) is not None}


def _tokenizer_config(vocabulary: GGUFVocabulary, checkpoint: Checkpoint) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.max_position,
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(vocabulary, f"{name}_id")
        if index is not None:
            values[f"{name}_token"] = vocabulary.tokens[index]
    if checkpoint.chat_template is not None:
        values["chat_template"] = checkpoint.chat_template
    return values
