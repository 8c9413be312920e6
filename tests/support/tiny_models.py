"""Tiny models: configurations of odd sizes, checkpoints in memory, and a runner that drives a model step by step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Checkpoint, TensorInfo
from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import AttentionContext, KVPool, Segment
from firsttoken.models import DecoderModel


class FakeTensors:
    """A tensor source over float32 tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def infos(self) -> dict[str, TensorInfo]:
        return {n: TensorInfo(n, tuple(t.shape), "F32", t.nbytes) for n, t in self.tensors.items()}

    def data(self, name: str) -> np.ndarray:
        tensor = self.tensors[name].contiguous()
        raw = tensor.numpy().view(np.uint8)
        return raw.reshape(tensor.shape[0], -1) if tensor.dim() == 2 else raw.reshape(-1)


def make_config(architecture: str = "LlamaForCausalLM", **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": architecture,
        "vocab_size": 211,
        "hidden_size": 60,
        "intermediate_size": 88,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "max_position": 512,
        "rope": RopeConfig(theta=5000.0),
        "attention_bias": architecture == "Qwen2ForCausalLM",
        "qk_norm": architecture == "Qwen3ForCausalLM",
    }
    return ModelConfig(**{**values, **changes})


def make_checkpoint(config: ModelConfig, tensors: Mapping[str, Tensor], source: str = "folder") -> Checkpoint:
    return Checkpoint(
        name="tiny",
        source=source,
        path="tiny-model",
        config=config,
        fingerprint="tiny",
        tensors=FakeTensors(tensors),
    )


class Runner:
    """Drives a model one step at a time over its own KV pool."""

    def __init__(self, model: DecoderModel, blocks: int = 64) -> None:
        c = model.config
        self.model = model
        self.pool = KVPool(
            KVFormat(dtype=model.kv_dtype, layers=c.num_layers, kv_heads=c.num_kv_heads, head_dim=c.head_dim), blocks
        )
        # Fresh memory may hold anything: nothing in it may reach a result.
        self.pool.storage.fill_(float("nan"))

    def step(self, work: list[tuple[list[int], int, Tensor]]) -> list[Tensor]:
        """``work`` holds (token ids, start, block table) a row; gives each row's logits ``[count, vocab]``."""
        segments = [Segment(table, start, len(ids)) for ids, start, table in work]
        tokens = torch.tensor([token for ids, _, _ in work for token in ids])
        positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
        context = AttentionContext.build(self.pool, segments)
        hidden = self.model.forward(tokens, positions, context, torch.arange(len(tokens)))
        return list(self.model.logits(hidden).split([len(ids) for ids, _, _ in work]))

    def whole(self, ids: list[int], first_block: int = 0) -> Tensor:
        """Logits of all positions from one prefill."""
        return self.step([(ids, 0, self.table(ids, first_block))])[0]

    def table(self, ids: list[int], first_block: int = 0) -> Tensor:
        return torch.arange(first_block, first_block + -(-(len(ids) + 1) // 16))
