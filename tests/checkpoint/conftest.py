"""Builders of small model files: well-formed ones by the formats' own writers, damaged ones byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "é", "<|endoftext|>"]
TOKEN_TYPES = [2, 3, 3, 1, 1, 1, 1, 3]


class RawGGUF:
    """A GGUF file as bytes, with every number open to damage."""

    magic = b"GGUF"
    version = 3
    num_tensors: int | None = None
    num_fields: int | None = None

    def __init__(self) -> None:
        self.fields: list[bytes] = []
        self.tensors: list[bytes] = []
        self.data = b""

    @staticmethod
    def string(text: bytes, length: int | None = None) -> bytes:
        return struct.pack("<Q", len(text) if length is None else length) + text

    def field(self, key: str, kind: int, value: bytes) -> RawGGUF:
        self.fields.append(self.string(key.encode()) + struct.pack("<I", kind) + value)
        return self

    def tensor(
        self,
        name: bytes,
        dims: list[int],
        kind: int,
        offset: int,
        *,
        num_dims: int | None = None,
        name_length: int | None = None,
    ) -> RawGGUF:
        self.tensors.append(
            self.string(name, name_length)
            + struct.pack("<I", len(dims) if num_dims is None else num_dims)
            + struct.pack(f"<{len(dims)}Q", *dims)
            + struct.pack("<IQ", kind, offset)
        )
        return self

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_fields = len(self.fields) if self.num_fields is None else self.num_fields
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_fields)
        head += b"".join(self.fields) + b"".join(self.tensors)
        return head + b"\0" * (-len(head) % 32) + self.data


@pytest.fixture
def raw_gguf() -> type[RawGGUF]:
    return RawGGUF


def llama_gguf_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of the llama architecture."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


WriteGGUF = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Write a one-layer model: hidden 64, 4 query and 2 KV heads of 16, 8 tokens. ``tensors`` adds to or (with None)
    removes from its tensors, ``extra(writer)`` adds metadata."""

    def write(
        arch: str = "llama",
        *,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        tensors: dict[str, np.ndarray | None] | None = None,
        extra: Callable[[gguf.GGUFWriter], None] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types(TOKEN_TYPES)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")
        if extra is not None:
            extra(writer)
        for tensor, values in {**gguf_tensors(), **(tensors or {})}.items():
            if values is None:
                continue
            if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def gguf_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 0, "content": "<unk>", "special": True},
        {"id": 2, "content": "<end>", "special": True},
        {"id": 3, "content": "plain", "special": False},
    ],
    "model": {"type": "BPE", "vocab": {"<unk>": 0, "x": 1, "<end>": 2, "plain": 3, "</s>": 4}, "merges": []},
}

WriteFolder = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Write a model folder; ``config`` changes keys of config.json (None removes), ``files`` adds text files."""

    def write(
        config: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        weights: dict[str, np.ndarray] | None = None,
        name: str = "tiny",
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        values = {key: value for key, value in {**LLAMA_CONFIG, **(config or {})}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(values))
        for file, text in (files or {}).items():
            (folder / file).write_text(text)
        save_file(weights or folder_weights(), folder / "model.safetensors")
        return folder

    return write


def folder_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "model.embed_tokens.weight": rng.standard_normal((8, 64), dtype=np.float32),
        "model.norm.weight": rng.standard_normal(64, dtype=np.float32).astype(np.float16),
    }


@pytest.fixture
def llama_config() -> dict[str, Any]:
    return dict(LLAMA_CONFIG)


@pytest.fixture
def tokenizer_json() -> str:
    return json.dumps(TOKENIZER)


@pytest.fixture
def permute() -> Callable[[np.ndarray, int], np.ndarray]:
    return llama_gguf_permute


@pytest.fixture
def tensors_written() -> dict[str, np.ndarray]:
    """The values that `write_gguf` writes."""
    return gguf_tensors()
